// Objects that Python refers to by numbers.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace paged {

template <class Object>
class Registry {
 public:
  // what: for error messages.
  explicit Registry(const char* what) : what_(what) {}

  // Keeps an object until `remove`, and returns its number.
  int64_t add(std::shared_ptr<const Object> object) {
    const std::lock_guard lock(mutex_);
    objects_[++last_] = std::move(object);
    return last_;
  }

  // Throws std::runtime_error if there is no object of this number.
  std::shared_ptr<const Object> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(number);
    if (found == objects_.end()) throw std::runtime_error(what_ + " " + std::to_string(number) + ": does not exist");
    return found->second;
  }

  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    objects_.erase(number);
  }

 private:
  const std::string what_;
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Object>> objects_;
  int64_t last_ = 0;
};

}  // namespace paged
