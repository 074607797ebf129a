#include "distckpt/formats/torch_save/pickle_copy.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kMaxValues = 1'000'000;
constexpr int kMaxCopyDepth = 100;

void write_elements(PickleWriter& pickle, PickleValue value);
void write_items(PickleWriter& pickle, PickleValue value);

void write_tree(PickleWriter& pickle, PickleValue value) {
  switch (value.kind()) {
    case PickleKind::kNone:
      pickle.none();
      return;
    case PickleKind::kBool:
      pickle.boolean(value.as_bool());
      return;
    case PickleKind::kInt:
      pickle.integer(value.as_int());
      return;
    case PickleKind::kFloat:
      pickle.real(value.as_float());
      return;
    case PickleKind::kString:
      pickle.string(value.as_string());
      return;
    case PickleKind::kList:
      pickle.begin_list();
      write_elements(pickle, value);
      pickle.end_list();
      return;
    case PickleKind::kTuple:
      pickle.begin_tuple();
      write_elements(pickle, value);
      pickle.end_tuple();
      return;
    case PickleKind::kSet:
      pickle.begin_call("builtins.set").begin_list();
      write_elements(pickle, value);
      pickle.end_list().end_call();
      return;
    case PickleKind::kDict:
      pickle.begin_dict();
      write_items(pickle, value);
      pickle.end_dict();
      return;
    case PickleKind::kGlobal:
      pickle.global(value.global_name());
      return;
    case PickleKind::kObject: {
      const auto args = value.object_args();
      const auto state = value.object_state();
      const bool plain = value.object_items().is_none() && value.object_appended().is_none();
      if (!plain || (args.size() > 0 && !state.is_none())) break;
      if (state.is_none()) {
        pickle.begin_call(value.object_class());
        write_elements(pickle, args);
        pickle.end_call();
      } else if (state.kind() == PickleKind::kDict) {
        pickle.begin_object(value.object_class());
        write_items(pickle, state);
        pickle.end_object();
      } else {
        pickle.begin_object_with_state(value.object_class());
        write_tree(pickle, state);
        pickle.end_object_with_state();
      }
      return;
    }
    case PickleKind::kBigInt:
    case PickleKind::kBytes:
    case PickleKind::kPersistentId:
      break;
  }
  value.fail_expected("a value that can be written anew");
}

void write_elements(PickleWriter& pickle, PickleValue value) {
  for (const auto element : value.elements()) write_tree(pickle, element);
}

void write_items(PickleWriter& pickle, PickleValue value) {
  for (const auto& [key, item] : value.items()) {
    write_tree(pickle, key);
    write_tree(pickle, item);
  }
}

}  // namespace

void write_value(PickleWriter& pickle, PickleValue value) {
  value.require_tree(kMaxValues, kMaxCopyDepth);
  write_tree(pickle, value);
}

}  // namespace ferry::distckpt
