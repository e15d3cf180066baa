# rec_sdk_python_package(torch) sets REC_SDK_TORCH to the folder of the installed package torch, unless it is set;
# rec_sdk_python_package(torch_npu) sets REC_SDK_TORCH_NPU. The packages are located with find_spec, without importing
# them: this is fast, and torch_npu cannot be imported without CANN or the emulated NPU.
function(rec_sdk_python_package package)
  string(TOUPPER "REC_SDK_${package}" variable)
  if(${variable})
    return()
  endif()
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter REQUIRED)
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('${package}').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE not_found)
  if(not_found)
    message(FATAL_ERROR "${package} is not installed in ${Python_EXECUTABLE}; install it there, "
                        "or set Python_EXECUTABLE or ${variable}")
  endif()
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()
