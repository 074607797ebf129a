#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/torch_save.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using distckpt::ReadFile;
using distckpt::TensorItem;
using distckpt::TorchArchive;

constexpr std::string_view kZipGlobals[] = {"torch.", "collections.OrderedDict",
                                            "argparse.Namespace"};

// Records lie inside the archive, apart from each other, and have the checksums stated.
void expect_sound(const TorchArchive& archive, const ReadFile& file) {
  std::vector<std::pair<std::int64_t, std::int64_t>> extents;
  for (const auto& record : archive.records) {
    expect(record.offset >= 0 && record.size >= 0 && record.offset <= file.size() &&
               record.size <= file.size() - record.offset,
           "record {} leaves the file", record.name);
    expect(archive.find(record.name) == &record, "record {} is there twice", record.name);
    extents.emplace_back(record.offset, record.offset + record.size);
    std::string bytes;
    if (!accepts([&] { bytes = read_torch_record(file, record); })) continue;
    expect(std::ssize(bytes) == record.size, "record {} has {} bytes", record.name, bytes.size());
    expect(record.crc32 == 0 || distckpt::crc32(distckpt::as_bytes(bytes)) == record.crc32,
           "record {} is read in spite of its checksum", record.name);
  }
  std::ranges::sort(extents);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    expect(extents[i - 1].second <= extents[i].first, "records overlap at byte {}",
           extents[i].first);
  }
}

// Every element lies in the storage, and the archive that is written for such a tensor reads alike.
void expect_sound(const TensorItem& item, const ReadFile& file) {
  const auto volume = checked_volume(item.shape);
  expect(volume && *volume * size_of(item.dtype) == item.payload_bytes, "{} bytes of shape {}",
         item.payload_bytes, to_string(item.shape));
  auto last = item.payload_offset;
  for (int d = 0; d < item.shape.rank() && *volume > 0; ++d)
    last += (item.shape[d] - 1) * item.strides[d] * size_of(item.dtype);
  const auto end = *volume > 0 ? last + size_of(item.dtype) : last;
  expect(item.payload_offset >= item.storage.offset && item.storage.size <= file.size() &&
             end <= item.storage.offset + item.storage.size,
         "elements from byte {} to {} leave their storage", item.payload_offset, end);
  if (item.contiguous) {
    expect(item.payload_offset + item.payload_bytes <= item.storage.offset + item.storage.size,
           "contiguous elements leave their storage");
  }
  constexpr std::int64_t kMaxWritten = 1 << 16;
  if (item.payload_bytes > kMaxWritten) return;
  const auto layout = distckpt::tensor_item_layout(item.dtype, item.shape);
  const std::string payload(static_cast<std::size_t>(layout.payload_bytes), 'x');
  const MemoryFile written(layout.head() + payload +
                           layout.tail(distckpt::crc32(distckpt::as_bytes(payload))));
  const auto again = distckpt::parse_tensor_item(ReadFile(written.path()), 0, layout.total_bytes());
  expect(again.dtype == item.dtype && again.shape == item.shape && again.contiguous &&
             again.payload_offset == layout.head_bytes &&
             again.payload_bytes == layout.payload_bytes,
         "{} {} is read back as {} {}", torch_name(item.dtype), to_string(item.shape),
         torch_name(again.dtype), to_string(again.shape));
}

// A file of many tensors: what its dict names, whole or not.
void check_file(const MemoryFile& memory) {
  const distckpt::TorchFile file(memory.path(), distckpt::object_globals(), "d");
  const ReadFile bytes(memory.path());
  const auto check = [&](distckpt::PickleValue value) {
    TensorItem item;
    if (accepts([&] { item = file.tensor(value, "one"); })) expect_sound(item, bytes);
  };
  check(file.root());
  if (file.root().kind() != distckpt::PickleKind::kDict) return;
  for (const auto& [key, value] : file.root().items()) check(value);
}

}  // namespace

void zip(std::string_view input) {
  constexpr std::int64_t kBefore = 100;  // bytes of other items
  const MemoryFile memory(std::string(kBefore, '\xEE') + std::string(input) + "behind");
  const ReadFile file(memory.path());
  const auto length = static_cast<std::int64_t>(input.size());
  TorchArchive archive;
  if (!accepts([&] { archive = read_torch_archive(file, kBefore, length); })) return;
  expect_sound(archive, file);
  TensorItem item;
  if (accepts([&] { item = parse_tensor_item(file, kBefore, length); })) expect_sound(item, file);
  accepts([&] { read_torch_object(file, kBefore, length, kZipGlobals).root().describe(); });
  accepts([&] { check_file(MemoryFile(input)); });
}

}  // namespace ferry::fuzz
