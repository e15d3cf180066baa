# Compiles types.cpp: case 0 must compile for both chip generations; every other case must fail with its message.
set(compile "${CMAKE_CXX_COMPILER}" -std=c++17 -fsyntax-only "-I${REC_SDK_ROOT}"
    "-I${REC_SDK_ROOT}/emulator/ascendc" "${CMAKE_CURRENT_SOURCE_DIR}/types.cpp")

foreach(arch 2201 3510)
  add_test(NAME types_compile_${arch} COMMAND ${compile} -DREC_SDK_CASE=0 -DREC_SDK_ASCENDC_ARCH=${arch})
endforeach()
add_test(NAME types_no_such_arch COMMAND ${compile} -DREC_SDK_CASE=0 -DREC_SDK_ASCENDC_ARCH=1234)
set_tests_properties(types_no_such_arch PROPERTIES
  PASS_REGULAR_EXPRESSION "error: static assertion failed: REC_SDK_ASCENDC_ARCH must be 2201 or 3510")

function(rec_sdk_must_not_compile case message)
  add_test(NAME types_${case} COMMAND ${compile} -DREC_SDK_CASE=${case})
  set_tests_properties(types_${case} PROPERTIES PASS_REGULAR_EXPRESSION "error: [^\n]*${message}")
endfunction()

rec_sdk_must_not_compile(1 "Add: .*bfloat16_t must be cast to float")
rec_sdk_must_not_compile(2 "Muls: .*bfloat16_t must be cast to float")
rec_sdk_must_not_compile(3 "Div: half and float only; integers must be cast to float")
rec_sdk_must_not_compile(4 "Add: half, float, int16_t and int32_t only")
rec_sdk_must_not_compile(5 "SetAtomicAdd: .*no 64-bit type")
rec_sdk_must_not_compile(6 "Scatter.* was not declared")
rec_sdk_must_not_compile(7 "Cast: this pair of types does not exist")
rec_sdk_must_not_compile(8 "PIPE_S is always in order")
rec_sdk_must_not_compile(9 "a queue of a vector core is at VECIN or VECOUT")
rec_sdk_must_not_compile(10 "Sqrt: .*bfloat16_t must be cast to float")
rec_sdk_must_not_compile(11 "Axpy: .half, half., .float, float. and .float, half. only")
rec_sdk_must_not_compile(12 "Duplicate: 16-bit and 32-bit types only")
rec_sdk_must_not_compile(13 "ReduceSum: half and float only")
rec_sdk_must_not_compile(14 "Exp: half and float only")
rec_sdk_must_not_compile(15 "AtomicAdd.* was not declared")
rec_sdk_must_not_compile(16 "is for queues; a TBuf takes a length alone")
rec_sdk_must_not_compile(17 "SaturationMode.* has not been declared")  # exists only from CANN 9.1 on
rec_sdk_must_not_compile(18 "Muls: with a count, isSetMask = false has no effect on 950")
rec_sdk_must_not_compile(19 "Adds: with a count, isSetMask = false has no effect on 950")
