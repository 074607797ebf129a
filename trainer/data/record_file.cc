#include "trainer/data/record_file.h"

#include "distckpt/base/error.h"
#include "trainer/data/jsonl_file.h"
#include "trainer/data/parquet_file.h"

namespace ferry::trainer {

std::unique_ptr<RecordFile> open_record_file(const std::filesystem::path& path) {
  const auto extension = path.extension();
  if (extension == ".parquet") return open_parquet_file(path);
  if (extension == ".jsonl" || extension == ".ndjson" || extension == ".json")
    return open_jsonl_file(path);
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: is no file of records by its name", path.string()),
              "name it .jsonl (a JSON object a line) or .parquet");
}

}  // namespace ferry::trainer
