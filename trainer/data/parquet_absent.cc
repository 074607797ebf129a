// Parquet in a program that was built without it.
#include "distckpt/base/error.h"
#include "trainer/data/parquet_file.h"

namespace ferry::trainer {

std::unique_ptr<RecordFile> open_parquet_file(const std::filesystem::path& path) {
  throw Error(
      ErrorKind::kUsage,
      fmt::format("{}: this program was built without Arrow, which reads Parquet", path.string()),
      "build with: meson configure -Darrow_root=FOLDER, that of a pyarrow wheel; or write "
      "the records as JSONL");
}

}  // namespace ferry::trainer
