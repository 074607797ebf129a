#include "distckpt/formats/torch_save/torch_save.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

#include "distckpt/formats/torch_save/torch_tensor.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_save_test {

using support::fails;

std::filesystem::path legacy_file() {
  return support::test_data(
      "legacy/llama_legacy_tp2pp2/iter_0000010/mp_rank_00_000/model_optim_rng.pt");
}

TEST(TorchFile, FindsEveryTensorOfAFileThatTorchWrote) {
  const TorchFile file(legacy_file(), object_globals(), "d");
  const auto model = file.root().at("model");
  const auto item = file.tensor(model.at("decoder.layers.1.mlp.linear_fc2.weight"), "fc2");
  EXPECT_EQ(item.dtype, DType::kBF16);
  EXPECT_EQ(item.shape, (Shape{32, 24}));
  EXPECT_TRUE(item.contiguous);
  EXPECT_EQ(item.payload_offset % 64, 0);
  EXPECT_EQ(item.payload_bytes, 32 * 24 * 2);
  EXPECT_NE(item.storage.crc32, 0U);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model_optim_rng.pt", "iteration", "10", "not a tensor"},
                    [&] { file.tensor(file.root().at("iteration"), "iteration"); }));
}

TEST(TorchFile, NamesAForeignGlobalAndTheWayOut) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                    {"argparse.Namespace", "nothing was executed", "python3 -c",
                     "torch.save(d['model'],f)", legacy_file().string()},
                    [] { TorchFile(legacy_file(), tensor_globals(), "d['model']"); }));
}

TEST(TorchFile, RefusesTheFormatBeforeZipByName) {
  support::TempDir dir;
  const auto path = dir.path() / "old.bin";
  const std::string magic("\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19.\x80\x02", 17);
  support::write_bytes(path, as_bytes(magic));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"old.bin", "before torch 1.6", "python3 -c"},
                    [&] { TorchFile(path, tensor_globals(), "d"); }));
}

TEST(TorchFile, RefusesACutFileWhereverItIsCut) {
  support::TempDir dir;
  const auto path = dir.path() / "cut.pt";
  const auto whole = support::read_bytes(legacy_file());
  for (std::size_t size = 0; size < whole.size(); size += 997) {
    support::write_bytes(path, std::span(whole).first(size));
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"cut.pt"}, [&] {
      TorchFile(path, object_globals(), "d");
    })) << size;
  }
}

}  // namespace torch_save_test
}  // namespace ferry::distckpt
