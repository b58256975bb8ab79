# The GPU kernels, free of Python and of XLA, and the module that hands them to JAX.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "JAX_MOK_CUDA=${JAX_MOK_CUDA} needs nvcc 13.0 or newer: put it on the PATH or "
    "set CUDACXX, or build for CPU devices only with JAX_MOK_CUDA=OFF")
endif()
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "JAX_MOK_CUDA=${JAX_MOK_CUDA} needs nvcc 13.0 or newer, found "
    "${CMAKE_CUDA_COMPILER_VERSION}: upgrade it, or build with JAX_MOK_CUDA=OFF")
endif()

# A folder that a Python package brings, or the same folder of a wheel fetched for the build.
function(find_headers result package requirement probe)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cuda/find_headers.py"
      "${package}" "${requirement}" "${probe}" "${CMAKE_CURRENT_BINARY_DIR}/wheels"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE folder COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

find_headers(CUTLASS_INCLUDE_DIR cutlass_library "nvidia-cutlass==4.2.0.0"
  "source/include/cutlass/cutlass.h")
find_headers(NCCL_INCLUDE_DIR nvidia "nvidia-nccl-cu13==2.28.9" "nccl/include/nccl_device.h")
# The collectives extension of XLA's FFI is younger than the oldest JAX this package works with.
find_headers(XLA_COLLECTIVES_INCLUDE_DIR jaxlib "jaxlib==0.11.2"
  "include/xla/ffi/api/collectives_api.h")

add_library(mok_cuda STATIC
  cuda/link/arena.cu cuda/link/exchange.cu
  cuda/sm90/finish.cu cuda/sm90/forward.cu cuda/sm90/move_rows.cu cuda/sm90/plan.cu
  cuda/sm90/tensor_map.cc cuda/sm90/weighted_sum.cu cuda/sm90/work_list.cu)
target_include_directories(mok_cuda PUBLIC cuda)
target_include_directories(mok_cuda SYSTEM PRIVATE "${CUTLASS_INCLUDE_DIR}" "${NCCL_INCLUDE_DIR}")
target_compile_options(mok_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
set_target_properties(mok_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
target_link_libraries(mok_cuda PUBLIC CUDA::cudart_static)

nanobind_add_module(_cuda NB_STATIC NOMINSIZE
  cuda/xla/gpu_composed.cc cuda/xla/gpu_device.cc cuda/xla/gpu_forward.cc cuda/xla/gpu_module.cc
  cuda/xla/gpu_plan.cc cuda/xla/gpu_weighted_sum.cc cuda/xla/peers.cc cuda/xla/workspace.cc)
target_include_directories(_cuda SYSTEM PRIVATE "${XLA_COLLECTIVES_INCLUDE_DIR}")
target_compile_options(_cuda PRIVATE -Wall -Wextra)
target_link_libraries(_cuda PRIVATE mok_cuda mok_host)
install(TARGETS _cuda LIBRARY DESTINATION .)
