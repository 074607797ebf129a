// Checkpoints in torch_dist that are described wrongly or damaged: refused, naming file and tensor.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/storage/filenames.h"
#include "tests/distckpt/formats/torch_dist_reading.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_dist_damage_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::TempDir;
using support::test_data;
using torch_dist_test::all_tensors;
using torch_dist_test::read_all;

// A checkpoint of two tensors that a test can describe wrongly: w [4, 3] in two chunks of rows, and
// norm [3]; all in __0_0.distcp.
struct Description {
  struct Chunk {
    Dims offset{};
    Dims size{};
  };
  struct Tensor {
    std::string key{};
    Dims size{};
    std::vector<Chunk> chunks{};
    std::string dtype = "torch.float32";
  };
  struct Item {
    std::string key{};
    std::optional<Dims> at{};
    std::int64_t offset = 0;
    std::int64_t length = 0;
    std::string file = "__0_0.distcp";
  };
  std::vector<Tensor> tensors{};
  std::vector<Item> items{};
  std::string root = "torch.distributed.checkpoint.metadata.Metadata";
  std::string config = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";
};

// Writes the data file and describes it rightly.
Description write_data(const fs::path& folder) {
  Description described{
      .tensors = {
          {.key = "w",
           .size = {4, 3},
           .chunks = {{.offset = {0, 0}, .size = {2, 3}}, {.offset = {2, 0}, .size = {2, 3}}}},
          {.key = "norm", .size = {3}, .chunks = {{.offset = {0}, .size = {3}}}}}};
  std::string file;
  for (const auto& tensor : described.tensors) {
    for (const auto& chunk : tensor.chunks) {
      const auto item = tensor_item_layout(DType::kF32, chunk.size);
      described.items.push_back({.key = tensor.key,
                                 .at = chunk.offset,
                                 .offset = std::ssize(file),
                                 .length = item.total_bytes()});
      const std::string payload(static_cast<std::size_t>(item.payload_bytes), '\7');
      file += item.head() + payload + item.tail(crc32(as_bytes(payload)));
    }
  }
  write_text(folder / "__0_0.distcp", file);
  return described;
}

void write_metadata(const fs::path& folder, const Description& described) {
  const std::string module = "torch.distributed.checkpoint.metadata.";
  PickleWriter pickle;
  pickle.begin_object(described.root).string("state_dict_metadata").begin_dict();
  for (const auto& tensor : described.tensors) {
    pickle.string(tensor.key).begin_object(module + "TensorStorageMetadata");
    pickle.string("properties").begin_object(module + "TensorProperties");
    pickle.string("dtype").global(tensor.dtype).end_object();
    pickle.string("size").size(tensor.size).string("chunks").begin_list();
    for (const auto& chunk : tensor.chunks) {
      pickle.begin_object(module + "ChunkStorageMetadata").string("offsets").size(chunk.offset);
      pickle.string("sizes").size(chunk.size).end_object();
    }
    pickle.end_list().end_object();
  }
  pickle.end_dict().string("storage_data").begin_dict();
  for (const auto& item : described.items) {
    pickle.begin_object(module + "MetadataIndex").string("fqn").string(item.key);
    if (item.at) pickle.string("offset").size(*item.at);
    pickle.end_object();
    pickle.begin_object("torch.distributed.checkpoint.filesystem._StorageInfo");
    pickle.string("relative_path").string(item.file).string("offset").integer(item.offset);
    pickle.string("length").integer(item.length).end_object();
  }
  pickle.end_dict().end_object();
  write_text(folder / kTorchDistMetadata, pickle.finish());
  write_text(folder / kTorchDistConfig, described.config);
}

// Reads all that can be read of a checkpoint that `change` has described wrongly.
void read_described(const std::function<void(Description&)>& change) {
  const TempDir dir;
  auto described = write_data(dir.path());
  change(described);
  write_metadata(dir.path(), described);
  const auto checkpoint = read_torch_dist(dir.path());
  const auto resolved = resolve_layout(checkpoint, all_tensors(checkpoint));
  FileSource source(resolved.layout.storages(), resolved.checksums);
  read_all(resolved, source);
  source.verify_checksums();
}

TEST(TorchDistDamage, ReadsTheCheckpointThatTheFollowingTestsDamage) {
  EXPECT_NO_THROW(read_described([](Description&) {}));
}

struct Wrong {
  const char* name;
  std::function<void(Description&)> change;
  std::vector<std::string_view> fragments;
  ErrorKind kind = ErrorKind::kCorrupt;
};

class TorchDistDescribed : public testing::TestWithParam<Wrong> {};

TEST_P(TorchDistDescribed, WronglyIsRefusedNamingFileAndTensor) {
  const auto& wrong = GetParam();
  EXPECT_TRUE(fails(wrong.kind, wrong.fragments, [&] { read_described(wrong.change); }));
}

constexpr auto kMaxInt64 = std::numeric_limits<std::int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    ,
    TorchDistDescribed,
    testing::Values(
        Wrong{"chunk_missing",
              [](Description& it) {
                it.tensors[0].chunks.pop_back();
                it.items.erase(it.items.begin() + 1);
              },
              {".metadata", "w: elements [2:4, 0:3]", "stored 0 times"}},
        Wrong{"chunk_beyond_the_shape",
              [](Description& it) {
                it.tensors[0].size = {3, 3};
              },
              {".metadata", "w", "[2:4, 0:3]", "[3, 3]"}},
        Wrong{"chunk_whose_end_overflows",
              [](Description& it) {
                it.tensors[0].chunks[1].offset = {kMaxInt64, 0};
              },
              {".metadata", "w", "[9223372036854775807:+2, 0:3] leaves the shape [4, 3]"}},
        Wrong{"chunk_of_another_rank",
              [](Description& it) {
                it.tensors[1].chunks[0].size = {1, 3};
              },
              {".metadata", "norm"}},
        Wrong{"chunk_twice",
              [](Description& it) { it.tensors[0].chunks.push_back(it.tensors[0].chunks[1]); },
              {".metadata", "w", "[2, 0]", "does not say where it lies"}},
        Wrong{"chunks_overlap",
              [](Description& it) {
                it.tensors[0].chunks[0].size = {3, 3};
              },
              {".metadata", "w: elements [2:3, 0:3]", "stored 2 times"}},
        Wrong{"chunk_of_another_size_than_its_archive",
              [](Description& it) {
                it.tensors[0].size = {4, 4};
                for (auto& chunk : it.tensors[0].chunks) chunk.size = {2, 4};
              },
              {"__0_0.distcp", "w", "[2, 3]", "[2, 4]"}},
        Wrong{"another_dtype_than_the_archive",
              [](Description& it) { it.tensors[1].dtype = "torch.bfloat16"; },
              {"__0_0.distcp", "norm", "float32", "bfloat16"}},
        Wrong{"unknown_dtype",
              [](Description& it) { it.tensors[1].dtype = "torch.Size"; },
              {".metadata", "norm", "torch.Size"}},
        Wrong{"key_twice",
              [](Description& it) { it.tensors.push_back(it.tensors[1]); },
              {".metadata", "norm", "twice"}},
        Wrong{"shape_overflows",
              [](Description& it) { it.tensors[1].size = {kMaxInt64}; },
              {".metadata", "norm", "overflows"}},
        Wrong{"item_missing",
              [](Description& it) { it.items.pop_back(); },
              {".metadata", "norm", "does not say where it lies"}},
        Wrong{"item_of_no_tensor",
              [](Description& it) { it.items.push_back({.key = "ghost", .at = Dims{0}}); },
              {".metadata", "1 items of no tensor", "ghost"}},
        Wrong{"item_twice",
              [](Description& it) { it.items.push_back(it.items[0]); },
              {".metadata", "w", "same item twice"}},
        Wrong{"items_overlap",
              [](Description& it) { it.items[1].offset -= 64; },
              {".metadata", "w", "__0_0.distcp"}},
        Wrong{"items_swapped",
              [](Description& it) {
                std::swap(it.items[1].offset, it.items[2].offset);
                std::swap(it.items[1].length, it.items[2].length);
              },
              {"__0_0.distcp", "[2, 3]", "[3] (norm)"}},
        Wrong{"item_beyond_the_end",
              [](Description& it) { it.items[2].length += 1; },
              {".metadata", "norm", "__0_0.distcp", "beyond its end"}},
        Wrong{"item_at_a_negative_offset",
              [](Description& it) { it.items[0].offset = -1; },
              {".metadata", "w"}},
        Wrong{"item_whose_end_overflows",
              [](Description& it) { it.items[2].length = kMaxInt64; },
              {".metadata", "norm", "beyond its end"}},
        Wrong{"item_too_short", [](Description& it) { it.items[2].length -= 8; }, {"__0_0.distcp"}},
        Wrong{"file_missing",
              [](Description& it) { it.items[2].file = "__1_0.distcp"; },
              {"__1_0.distcp", "No such file"},
              ErrorKind::kNotFound},
        Wrong{"file_above_the_folder",
              [](Description& it) { it.items[2].file = "../__0_0.distcp"; },
              {".metadata", "../__0_0.distcp"}},
        Wrong{"file_elsewhere",
              [](Description& it) { it.items[2].file = "/etc/passwd"; },
              {".metadata", "/etc/passwd"}},
        Wrong{"another_root",
              [](Description& it) {
                it.root = "torch.distributed.checkpoint.metadata.MetadataIndex";
              },
              {".metadata", "not the Metadata"}},
        Wrong{"a_class_of_someone_else",
              [](Description& it) { it.root = "subprocess.Popen"; },
              {".metadata", "subprocess.Popen"}},
        Wrong{"another_backend",
              [](Description& it) { it.config = R"({"sharded_backend": "zarr"})"; },
              {"metadata.json", "zarr", "torch_dist"},
              ErrorKind::kLayout},
        Wrong{"another_version",
              [](Description& it) {
                it.config = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 2})";
              },
              {"metadata.json", "sharded_backend_version", "2"}},
        Wrong{"an_unknown_setting",
              [](Description& it) { it.config = R"({"sharded_backend": "torch_dist", "x": 1})"; },
              {"metadata.json", "\"x\""}}),
    [](const auto& wrong) { return wrong.param.name; });

TEST(TorchDistDamage, RefusesAPickleThatNamesACommandAndRunsNothing) {
  const TempDir dir;
  write_metadata(dir.path(), write_data(dir.path()));
  PickleWriter pickle;
  pickle.begin_call("os.system").string("touch " + (dir / "run").string()).end_call();
  write_text(dir / ".metadata", pickle.finish());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {".metadata", "os.system", "byte"},
                    [&] { read_torch_dist(dir.path()); }));
  EXPECT_FALSE(fs::exists(dir / "run"));
}

TEST(TorchDistDamage, RefusesTheSameInTheCommonState) {
  const TempDir dir;
  write_metadata(dir.path(), write_data(dir.path()));
  PickleWriter pickle;
  pickle.begin_call("os.system").string("touch " + (dir / "run").string()).end_call();
  write_text(dir / "common.pt", torch_archive(pickle.finish(), "common"));
  const auto checkpoint = read_torch_dist(dir.path());
  EXPECT_TRUE(checkpoint.has_common_file);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"common.pt", "os.system"},
                    [&] { read_common_state(checkpoint); }));
  EXPECT_FALSE(fs::exists(dir / "run"));
}

TEST(TorchDistDamage, SaysWhatIsMissing) {
  const TempDir dir;
  EXPECT_FALSE(is_torch_dist(dir.path()));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"metadata.json"}, [&] { read_torch_dist(dir.path()); }));
  write_metadata(dir.path(), write_data(dir.path()));
  EXPECT_TRUE(is_torch_dist(dir.path()));
  EXPECT_FALSE(read_common_state(read_torch_dist(dir.path())).has_value());
  fs::remove(dir / ".metadata");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {".metadata"}, [&] { read_torch_dist(dir.path()); }));
}

// The file was changed after its headers were read, and before its bytes are.
TEST(TorchDistDamage, NoticesAFlippedBitByTheArchivesOwnChecksum) {
  const TempDir dir;
  fs::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy", fs::copy_options::recursive);
  const auto checkpoint = read_torch_dist(dir / "copy");
  const auto& tensor = checkpoint.tensors.back();
  const auto resolved = resolve_layout(checkpoint, std::vector{&tensor});
  support::corrupt(dir / "copy/__0_0.distcp", resolved.layout.tensor(0).shards[0].at.offset + 5);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"__0_0.distcp", tensor.key, "CRC-32"}, [&] {
    read_all(resolved, source);
    source.verify_checksums();
  }));
}

// Wherever the metadata is damaged, it is refused or describes what can be read.
TEST(TorchDistDamage, SurvivesMutationsOfItsMetadata) {
  const TempDir dir;
  fs::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy", fs::copy_options::recursive);
  const auto original = read_text(dir / "copy/.metadata");
  Random random(5);
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    auto mutated = original;
    for (auto edits = random.between(1, 2); edits > 0; --edits) {
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(mutated) - 1));
      mutated[at] = static_cast<char>(random.bits());
    }
    if (random.chance(5)) mutated.resize(static_cast<std::size_t>(random.between(0, 500)));
    support::write_bytes(dir / "copy/.metadata", as_bytes(mutated));
    try {
      const auto checkpoint = read_torch_dist(dir / "copy");
      resolve_layout(checkpoint, all_tensors(checkpoint));
    } catch (const Error& error) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

}  // namespace torch_dist_damage_test
}  // namespace ferry::distckpt
