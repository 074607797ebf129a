// Emits a pickle of protocol 2, value after value, as a program for Python's pickle machine.
// Strings and globals are memoised: each is spelled once and recalled by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/formats/torch_save/pickle_opcodes.h"

namespace ferry::distckpt {

// Calls chain, and read as the value they build:
//
//   PickleWriter pickle;
//   pickle.begin_dict().string("iteration").integer(10).string("args");
//   pickle.begin_object("argparse.Namespace").string("num_layers").integer(4).end_object();
//   pickle.end_dict();
//   write_text(path, pickle.finish());
//
// Throws Error(kBug) where begin and end do not match, or a dict has a key without a value.
class PickleWriter {
 public:
  PickleWriter();

  PickleWriter& none();
  PickleWriter& boolean(bool value);
  PickleWriter& integer(std::int64_t value);
  PickleWriter& real(double value);
  PickleWriter& string(std::string_view text);  // UTF-8
  PickleWriter& global(std::string_view name);  // "torch.bfloat16": the module ends at the last dot

  PickleWriter& begin_tuple();
  PickleWriter& end_tuple();
  PickleWriter& begin_list();
  PickleWriter& end_list();
  PickleWriter& begin_dict();  // key, value, key, value
  PickleWriter& end_dict();

  // function(argument, ...): the arguments stand between begin and end.
  PickleWriter& begin_call(std::string_view function);
  PickleWriter& end_call();

  // class.__new__(class), then its attributes: key, value, key, value. Without any, nothing is set.
  PickleWriter& begin_object(std::string_view class_name);
  PickleWriter& end_object();

  // class.__new__(class), then __setstate__ of the one value between begin and end.
  PickleWriter& begin_object_with_state(std::string_view class_name);
  PickleWriter& end_object_with_state();

  // Begins the reference that the reader's persistent_load resolves: a tuple of the values between
  // begin and end.
  PickleWriter& begin_persistent_id();
  PickleWriter& end_persistent_id();

  PickleWriter& integers(const Dims& dims);  // a tuple
  PickleWriter& size(const Dims& dims);      // torch.Size(...)

  // The bytes, complete. The writer is spent.
  std::string finish();

 private:
  enum class Frame : std::uint8_t { kTuple, kList, kDict, kCall, kObject, kState, kPersistentId };

  struct Open {
    Frame frame = Frame::kTuple;
    std::size_t mark = 0;  // where its MARK stands; what proves short is written without
    std::int64_t values = 0;
  };

  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>{}(text);
    }
  };
  using Memo = std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>>;

  PickleWriter& value();  // counts one in the innermost frame
  PickleWriter& open(Frame frame);
  Open close(Frame frame);
  void end_marked(const Open& open, opcode::Opcode last);
  void end_as_tuple(const Open& open);
  bool recall(const Memo& memo, std::string_view text);
  void memoise(Memo& memo, std::string_view text);
  void emit_global(std::string_view name);
  void op(int byte) { out_.push_back(static_cast<char>(byte)); }

  std::string out_;
  std::vector<Open> open_;
  Memo strings_;
  Memo globals_;
};

}  // namespace ferry::distckpt
