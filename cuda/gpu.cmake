# The GPU kernels and their calls, free of Python and of XLA, and the modules that hand them to JAX.
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
# XLA takes handlers built with its own FFI headers or older ones, and refuses newer ones. Those of
# one rank alone are therefore built with the oldest supported JAX's; those with peers need the
# collectives extension, which is younger.
find_headers(XLA_OLDEST_INCLUDE_DIR jaxlib "jaxlib==0.10.2" "include/xla/ffi/api/ffi.h")
find_headers(XLA_COLLECTIVES_INCLUDE_DIR jaxlib "jaxlib==0.11.2"
  "include/xla/ffi/api/collectives_api.h")

# All that launches kernels, in one library of its own: two modules call it, and what it knows of
# devices, arenas and calls must exist once in a process.
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
add_library(mok_cuda SHARED
  cuda/call/arenas.cc cuda/call/backward.cc cuda/call/backward_workspace.cc cuda/call/device.cc
  cuda/call/forward.cc cuda/call/forward_workspace.cc cuda/call/mx.cc cuda/call/peers.cc
  cuda/call/plan.cc cuda/call/timeline.cc cuda/call/waves.cc cuda/call/weighted_sum.cc
  cuda/link/arena.cu cuda/link/exchange.cu cuda/sm90/backward.cu cuda/sm90/backward_list.cu
  cuda/sm90/backward_moves.cu cuda/sm90/backward_mx.cu cuda/sm90/choices.cu cuda/sm90/finish.cu
  cuda/sm90/forward.cu cuda/sm90/forward_mx.cu cuda/sm90/move_rows.cu cuda/sm90/mx.cu
  cuda/sm90/plan.cu cuda/sm90/round_rows.cu cuda/sm90/tensor_map.cc cuda/sm90/weighted_sum.cu
  cuda/sm90/work_list.cu)
target_include_directories(mok_cuda PUBLIC cuda)
option(JAX_MOK_INJECT_FAULTS "hooks in the GPU kernels by which tests commit faults" OFF)
if(JAX_MOK_INJECT_FAULTS)
  target_sources(mok_cuda PRIVATE cuda/call/inject.cc)
  target_compile_definitions(mok_cuda PUBLIC JAX_MOK_INJECT_FAULTS)
endif()
target_include_directories(mok_cuda SYSTEM PRIVATE "${CUTLASS_INCLUDE_DIR}" "${NCCL_INCLUDE_DIR}")
target_compile_options(mok_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
set_target_properties(mok_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static BUILD_WITH_INSTALL_RPATH ON)
target_link_libraries(mok_cuda PUBLIC CUDA::toolkit PRIVATE CUDA::cudart_static)
# Shows the functions marked MOK_EXPORT only, not the CUDA runtime's: XLA has one of its own.
target_link_options(mok_cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,-z,defs)
install(TARGETS mok_cuda LIBRARY DESTINATION .)

# A module of handlers built with one version of XLA's headers. Inline functions of two versions
# have the same names, so no object file, and no library, may see both.
function(add_handlers module xla_include_dir)
  nanobind_add_module(${module} NB_STATIC NOMINSIZE ${ARGN})
  target_include_directories(${module} SYSTEM PRIVATE "${xla_include_dir}")
  target_compile_options(${module} PRIVATE -Wall -Wextra)
  target_link_libraries(${module} PRIVATE mok_cuda mok_host)
  # The library lies beside it, here as where it is installed.
  set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${module} LIBRARY DESTINATION .)
endfunction()

add_handlers(_cuda "${XLA_OLDEST_INCLUDE_DIR}" cuda/xla/gpu_handlers.cc cuda/xla/gpu_module.cc)
add_handlers(_cuda_peers "${XLA_COLLECTIVES_INCLUDE_DIR}"
  cuda/xla/gpu_peers_handlers.cc cuda/xla/gpu_peers_module.cc cuda/xla/peers.cc)
