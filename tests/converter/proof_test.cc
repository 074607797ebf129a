#include "converter/proof.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace proof_test {

using support::fails;

class ProofOfAFolder : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "hf", 1);
    prove();
  }
  void prove() {
    proof_.emplace(dir_ / "hf", OpenOptions(), std::set<std::string>(), alone_,
                   distckpt::ExecutorOptions());
    proof_->read({});
    proof_->finish();
  }

  support::TempDir dir_;
  const SharedWork alone_{{}, {}};
  std::optional<Proof> proof_;
};

TEST_F(ProofOfAFolder, HoldsForItsOwnDigests) {
  EXPECT_EQ(proof_->digests().size(), proof_->written().tensors.size());
  EXPECT_NO_THROW(proof_->require_same(proof_->written().tensors, proof_->digests()));
}

TEST_F(ProofOfAFolder, NamesATensorOfAnotherDigest) {
  auto digests = proof_->digests();
  std::swap(digests.front(), digests.back());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                    {proof_->written().tensors.front().name, "is not what was read", "--resume"},
                    [&] { proof_->require_same(proof_->written().tensors, digests); }));
}

TEST_F(ProofOfAFolder, NamesATensorThatIsMissing) {
  auto tensors = proof_->written().tensors;
  auto digests = proof_->digests();
  tensors.push_back({.name = "model.other.weight", .shape = {1}});
  digests.emplace_back();
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"model.other.weight", "it is missing"},
                    [&] { proof_->require_same(tensors, digests); }));
}

TEST_F(ProofOfAFolder, ADerivedTensorMayBeMissing) {
  auto tensors = proof_->written().tensors;
  auto digests = proof_->digests();
  tensors.push_back({.name = "inv_freq", .shape = {1}, .role = distckpt::Role::kDerived});
  digests.emplace_back();
  EXPECT_NO_THROW(proof_->require_same(tensors, digests));
}

TEST_F(ProofOfAFolder, ReadsTheFilesAnew) {
  const auto tensors = proof_->written().tensors;
  const auto digests = proof_->digests();
  const auto path = dir_ / "hf/model.safetensors";
  support::corrupt(path, static_cast<std::int64_t>(std::filesystem::file_size(path)) - 1);
  prove();
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"is not what was read"},
                    [&] { proof_->require_same(tensors, digests); }));
}

}  // namespace proof_test
}  // namespace ferry::converter
