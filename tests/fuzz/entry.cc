// libFuzzer's entry into the target that FERRY_FUZZ_TARGET names.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ferry::fuzz::FERRY_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
