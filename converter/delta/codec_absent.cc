// In the place of the forms of deltas, where there is no zstd.
#include "converter/delta/delta.h"
#include "converter/delta/delta_writer.h"
#include "converter/delta/slime_version.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

[[noreturn]] void fail_without_zstd() {
  fail(ErrorKind::kUsage, "deltas need zstd, which this program was built without");
}

}  // namespace

bool is_slime_delta(const std::filesystem::path&) {
  fail_without_zstd();
}
std::unique_ptr<Delta> open_ferry_delta(const std::filesystem::path&) {
  fail_without_zstd();
}
std::unique_ptr<Delta> open_slime_delta(const std::filesystem::path&) {
  fail_without_zstd();
}
std::unique_ptr<DeltaWriter> make_ferry_writer(const std::vector<DeltaTensor>&, Spool&) {
  fail_without_zstd();
}
std::unique_ptr<DeltaWriter> make_slime_writer(const std::vector<DeltaTensor>&,
                                               std::vector<std::pair<std::string, std::uint32_t>>,
                                               std::int64_t,
                                               Spool&) {
  fail_without_zstd();
}
std::unique_ptr<DeltaWriter> make_patch_writer(const std::vector<DeltaTensor>&, Spool&) {
  fail_without_zstd();
}

}  // namespace ferry::converter
