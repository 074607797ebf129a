// safetensors, torch.save archives and torch_dist, against files that their own libraries wrote
// (tests/data).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "distckpt/file_box_io.h"
#include "distckpt/pickle_writer.h"
#include "distckpt/safetensors.h"
#include "distckpt/torch_dist.h"
#include "distckpt/torch_dist_writer.h"
#include "distckpt/torch_zip.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace {

using support::fails;
using support::TempDir;
using support::test_data;

std::string u64(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
  return bytes;
}

// A file of that header and that many bytes of data.
std::filesystem::path write_safetensors(const TempDir& dir,
                                        const std::string& header,
                                        std::size_t data) {
  const auto path = dir / "model.safetensors";
  write_text(path, u64(header.size()) + header + std::string(data, 'x'));
  return path;
}

TEST(Safetensors, WritesTheHeaderThatTheLibraryWrites) {
  for (const auto* name : {"hf_llama", "hf_qwen2", "hf_qwen2_tied", "hf_qwen3"}) {
    const auto found = read_safetensors_header(test_data(name) / "hf" / "model.safetensors");
    auto entries = found.entries;
    std::ranges::reverse(entries);
    EXPECT_EQ(make_safetensors_header("model.safetensors", entries, found.metadata).prefix,
              found.prefix)
        << name;
  }
}

TEST(Safetensors, RefusesMalformedHeadersNamingTheTensor) {
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}}";
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {entry("\"F32\"", "[2]", "[0,4]"), "takes 8 bytes"},
      {entry("\"F32\"", "[2]", "[0,80]"), "takes 8 bytes"},
      {entry("\"F32\"", "[20]", "[0,80]"), "ends at byte 80"},
      {entry("\"F32\"", "[2]", "[4,12]"), "begins at byte 4"},
      {entry("\"F99\"", "[2]", "[0,8]"), "unknown dtype"},
      {entry("\"F32\"", "[-2]", "[0,8]"), "holds -2"},
      {entry("\"F32\"", "[2.0]", "[0,8]"), "an integer is expected"},
      {entry("\"F32\"", "[4611686018427387904,4]", "[0,8]"), "overflows"},
      {entry("\"F32\"", "[18446744073709551615]", "[0,8]"), "too large"},
      {entry("\"F32\"", "[1,1,1,1,1,1,2]", "[0,8]"), "at most 6"},
      {entry("32", "[2]", "[0,8]"), "a string is expected"},
      {entry("\"F32\"", "[2]", "[0]"), "not a pair"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       "begins at byte 0"},
  };
  for (const auto& [header, message] : cases) {
    const TempDir dir;
    const auto path = write_safetensors(dir, header, 16);
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model.safetensors", ": a", message},
                      [&] { read_safetensors_header(path); }) ||
                fails(ErrorKind::kCorrupt, {"model.safetensors", ": b", message},
                      [&] { read_safetensors_header(path); }))
        << header;
  }
  for (const auto& [header, message] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "not a JSON object"},
           {"{", "not valid JSON"},
           {R"({"a":1,"a":2})", "occurs twice"},
           {R"({"__metadata__":{"format":1}})", "a string is expected"}}) {
    const TempDir dir;
    const auto path = write_safetensors(dir, header, 0);
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model.safetensors", message},
                      [&] { read_safetensors_header(path); }));
  }
}

TEST(Safetensors, RefusesALengthThatPromisesTerabytes) {
  const TempDir dir;
  write_text(dir / "a.safetensors", u64(std::uint64_t{1} << 42) + "{}");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.safetensors", "byte 0"},
                    [&] { read_safetensors_header(dir / "a.safetensors"); }));
  write_text(dir / "b.safetensors", "{}");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"only 2 bytes"},
                    [&] { read_safetensors_header(dir / "b.safetensors"); }));
}

TEST(Safetensors, NeverCrashesOnAMutatedHeader) {
  auto prefix = read_safetensors_header(test_data("hf_llama") / "hf" / "model.safetensors").prefix;
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    auto mutated = prefix;
    mutated[random() % mutated.size()] = static_cast<char>(random());
    try {
      parse_safetensors_prefix(mutated, "m", "m");
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

// ---- torch.save archives ----

struct Fixture {
  TorchDistCheckpoint checkpoint = read_torch_dist(test_data("llama_tp1") / "iter_0000010");
};

TEST(TorchZip, PlacesATensorExactlyAsTorchDoes) {
  const Fixture fixture;
  for (const auto& tensor : fixture.checkpoint.tensors) {
    for (const auto& chunk : tensor.chunks) {
      const ReadFile file(fixture.checkpoint.files[chunk.item.file].path);
      const auto item = parse_tensor_item(file, chunk.item.offset, chunk.item.length);
      const auto layout = tensor_item_layout(tensor.dtype, chunk.box.size);
      ASSERT_EQ(layout.total_bytes(), chunk.item.length) << tensor.key;
      ASSERT_EQ(chunk.item.offset + layout.head_bytes, item.payload_offset) << tensor.key;
      std::string head(static_cast<std::size_t>(layout.head_bytes), '\0');
      file.read_at(chunk.item.offset, std::as_writable_bytes(std::span(head)));
      EXPECT_EQ(layout.head(), head) << tensor.key;
    }
  }
}

TEST(TorchZip, NeverCrashesOnAMutatedArchive) {
  const TempDir dir;
  const auto archive = torch_archive(PickleWriter().begin_list().integer(7).end_list().finish());
  const std::vector<std::string_view> globals;
  std::mt19937 random(2);
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    auto mutated = archive;
    if (i % 4 == 0) mutated.resize(random() % mutated.size());
    if (!mutated.empty())
      mutated[random() % mutated.size()] ^= static_cast<char>(1 << random() % 8);
    support::write_bytes(dir / "a.pt", std::as_bytes(std::span(mutated)));
    try {
      const ReadFile file(dir / "a.pt");
      read_torch_object(file, 0, file.size(), globals);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1500);
}

// ---- torch_dist ----

std::vector<std::byte> read_tensor(const Layout& layout,
                                   const TensorLayout& tensor,
                                   FileSource& source) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.num_bytes()));
  auto strides = row_major_strides(tensor.shape);
  for (int d = 0; d < strides.rank(); ++d) strides[d] *= size_of(tensor.dtype);
  for (const auto& shard : tensor.shards) {
    std::vector<ChecksumPart> parts;
    std::vector<std::byte> packed(
        static_cast<std::size_t>(shard.box.volume() * size_of(tensor.dtype)));
    source.read({.at = shard.at, .size = shard.box.size, .element_size = size_of(tensor.dtype)},
                packed, parts);
    source.commit(parts);
    std::int64_t first = 0;
    for (int d = 0; d < strides.rank(); ++d) first += shard.box.offset[d] * strides[d];
    auto packed_strides = packed_shard(shard.box, tensor.dtype, 0, 0).at.strides;
    copy_strided(bytes.data() + first, strides, packed.data(), packed_strides, shard.box.size,
                 size_of(tensor.dtype));
  }
  static_cast<void>(layout);
  return bytes;
}

class TorchDistFixture : public testing::TestWithParam<const char*> {};

TEST_P(TorchDistFixture, HoldsTheTensorsThatItsWriterStated) {
  auto folder = test_data(GetParam());
  const auto stated = nlohmann::json::parse(read_text(folder / "sha256.json")).at("megatron");
  if (std::filesystem::exists(folder / "iter_0000010")) folder /= "iter_0000010";
  const auto checkpoint = read_torch_dist(folder);
  std::vector<const TorchDistTensor*> model;
  for (const auto& tensor : checkpoint.tensors) {
    if (!tensor.key.starts_with("optimizer.")) model.push_back(&tensor);
  }
  ASSERT_EQ(model.size(), stated.size());
  const auto resolved = resolve_layout(checkpoint, model);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  for (const auto& tensor : resolved.layout.tensors()) {
    const auto& expected = stated.at(tensor.name);
    EXPECT_EQ(torch_name(tensor.dtype), expected.at("dtype").get<std::string>());
    EXPECT_EQ(support::sha256(read_tensor(resolved.layout, tensor, source)),
              expected.at("sha256").get<std::string>())
        << tensor.name;
  }
  EXPECT_EQ(source.verify_checksums(), static_cast<std::int64_t>(resolved.checksums.size()));
  check_objects(checkpoint);
}

INSTANTIATE_TEST_SUITE_P(Releases,
                         TorchDistFixture,
                         testing::Values("llama_tp1",
                                         "llama_tp2pp2",
                                         "llama_tp2pp2_local",
                                         "llama_tp2pp2_mc0131",
                                         "llama_tp2pp2_mc0161",
                                         "llama_singleton",
                                         "qwen2",
                                         "qwen2_tied_pp2",
                                         "qwen3",
                                         "llama_optim_full",
                                         "llama_optim_dp",
                                         "llama_optim_fsms"),
                         [](const auto& parameter) { return std::string(parameter.param); });

TEST(TorchDist, RefusesAPickleThatNamesACommandAndRunsNothing) {
  const TempDir dir;
  std::filesystem::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy",
                        std::filesystem::copy_options::recursive);
  PickleWriter pickle;
  pickle.begin_call("os.system").string("touch " + (dir / "run").string()).end_call();
  write_text(dir / "copy" / ".metadata", pickle.finish());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {".metadata", "os.system", "byte"},
                    [&] { read_torch_dist(dir / "copy"); }));
  EXPECT_FALSE(std::filesystem::exists(dir / "run"));
}

TEST(TorchDist, ReadsWhatItWrote) {
  const TempDir dir;
  std::vector<RankState> ranks(2);
  for (std::int64_t r = 0; r < 2; ++r) {
    ranks[static_cast<std::size_t>(r)].tensors.push_back({.key = "w",
                                                          .dtype = DType::kF32,
                                                          .local_shape = {2, 3},
                                                          .global_shape = {4, 3},
                                                          .global_offset = {2 * r, 0},
                                                          .replica_id = {0}});
    ranks[static_cast<std::size_t>(r)].tensors.push_back({.key = "norm",
                                                          .dtype = DType::kF32,
                                                          .local_shape = {3},
                                                          .global_shape = {3},
                                                          .global_offset = {0},
                                                          .replica_id = {static_cast<int>(r)}});
  }
  ranks[0].extra_states.push_back(
      {.key = "linear._extra_state", .global_shape = {1}, .global_offset = {0}});
  const TorchDistTarget target(dir.path(), ranks, [](PickleWriter& pickle) {
    pickle.begin_dict().string("iteration").integer(7).end_dict();
  });
  FileSink sink(target.layout().storages(), target.protected_ranges(), WriteFile::Mode::kCreate);
  std::vector<ChecksumPart> parts;
  for (const auto& tensor : target.layout().tensors()) {
    for (const auto& shard : tensor.shards) {
      const std::vector<std::byte> bytes(static_cast<std::size_t>(shard.box.volume() * 4),
                                         std::byte{42});
      sink.write({.at = shard.at, .size = shard.box.size, .element_size = 4}, bytes, parts);
    }
  }
  sink.commit(parts);
  target.finish(sink);

  const auto found = read_torch_dist(dir.path());
  ASSERT_EQ(found.tensors.size(), 2U);
  EXPECT_EQ(found.tensors[0].chunks.size(), 1U);  // replicas are written once
  EXPECT_EQ(found.tensors[1].chunks.size(), 2U);
  EXPECT_EQ(found.objects.size(), 1U);
  check_objects(found);
  EXPECT_EQ(common_dict(*read_common_state(found)).at("iteration").as_int(), 7);
  const std::vector<const TorchDistTensor*> all{&found.tensors[0], &found.tensors[1]};
  const auto resolved = resolve_layout(found, all);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  for (const auto& tensor : resolved.layout.tensors()) {
    for (const auto byte : read_tensor(resolved.layout, tensor, source))
      ASSERT_EQ(byte, std::byte{42});
  }
  EXPECT_EQ(source.verify_checksums(), 3);
}

TEST(TorchDist, NoticesAFlippedBitByTheArchivesOwnChecksum) {
  const TempDir dir;
  std::filesystem::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy",
                        std::filesystem::copy_options::recursive);
  const auto checkpoint = read_torch_dist(dir / "copy");
  const auto& tensor = checkpoint.tensors.back();
  const std::vector<const TorchDistTensor*> one{&tensor};
  const auto resolved = resolve_layout(checkpoint, one);
  support::corrupt(dir / "copy" / "__0_0.distcp",
                   resolved.layout.tensor(0).shards[0].at.offset + 5);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"__0_0.distcp", tensor.key, "CRC-32"}, [&] {
    // The file was changed after its headers were read, and before its bytes are.
    read_tensor(resolved.layout, resolved.layout.tensor(0), source);
    source.verify_checksums();
  }));
}

}  // namespace
}  // namespace ferry::distckpt
