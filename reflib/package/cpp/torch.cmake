# The wrapper calls ATen: PyTorch's libraries are linked, none of its headers are needed. They are found by
#   -DTORCH_DIR=<folder of torch, or of libtorch>    or by
#   -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
# EXTRA_LIBRARIES: those that register further operators.
set(EXTRA_LIBRARIES "" CACHE STRING "Libraries that register operators")
set(linked ${EXTRA_LIBRARIES})
foreach(name torch_cpu c10 torch_cuda c10_cuda)
  find_library(${name} ${name} HINTS ${TORCH_DIR}/lib PATH_SUFFIXES ../../lib)
  if(${name})
    list(APPEND linked ${${name}})
  endif()
endforeach()
if(NOT torch_cpu)
  message(FATAL_ERROR "PyTorch was not found: this model calls ATen. Name its folder: -DTORCH_DIR=...")
endif()
target_link_libraries(${MODEL} PRIVATE -Wl,--no-as-needed ${linked} -Wl,--as-needed)
# What PyTorch's own libraries need, they find when they are loaded.
target_link_options(${MODEL} PUBLIC -Wl,--allow-shlib-undefined)
