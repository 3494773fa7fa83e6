# -DFATBIN_ARCHS="86;90": the assembly text is compiled for these GPUs when the project is built, and kept for all others
# beside their machine code (in fatbins, of which the driver takes the right part). Needs ptxas and fatbinary, which are
# in NVIDIA's CUDA toolkit: found there, on the path, or named by -DPTXAS=... -DFATBINARY=...
set(FATBIN_ARCHS "" CACHE STRING "GPUs to compile the assembly text for, such as 86;90")
if(FATBIN_ARCHS)
  find_program(PTXAS ptxas HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  find_program(FATBINARY fatbinary HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  if(NOT PTXAS OR NOT FATBINARY)
    message(FATAL_ERROR "FATBIN_ARCHS needs ptxas and fatbinary: install NVIDIA's CUDA toolkit, or name them")
  endif()
  set(fatbins ${CMAKE_CURRENT_BINARY_DIR}/fatbin) # found by kernels.S before the texts of the same names
  file(GLOB texts RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.ptx)
  file(MAKE_DIRECTORY ${fatbins}/kernels)
  foreach(text ${texts})
    set(from ${CMAKE_CURRENT_SOURCE_DIR}/${text})
    set(made ${fatbins}/${text})
    set(commands)
    set(parts --image3=kind=ptx,sm=@PTX@,file=${from})
    foreach(arch ${FATBIN_ARCHS})
      list(APPEND commands COMMAND ${PTXAS} -arch=sm_${arch} ${from} -o ${made}.${arch}.cubin)
      list(APPEND parts --image3=kind=elf,sm=${arch},file=${made}.${arch}.cubin)
    endforeach()
    add_custom_command(OUTPUT ${made} ${commands} COMMAND ${FATBINARY} -64 --create=${made} ${parts}
      DEPENDS ${from} VERBATIM)
    list(APPEND images ${made})
  endforeach()
  set_source_files_properties(kernels.S PROPERTIES OBJECT_DEPENDS "${images}")
  target_include_directories(${MODEL} BEFORE PRIVATE ${fatbins})
endif()
