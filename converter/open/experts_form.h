// The form in which a checkpoint has the experts of a layer: apart, or all in one tensor, which may
// lie transposed.
#pragma once

#include <vector>

#include "converter/open/checkpoint.h"

namespace ferry::converter {

// Takes the experts of a layer apart that a checkpoint has in one tensor, if its family also has
// names for each. `tensors` are those of the checkpoint with the dtypes that they shall have.
// Throws Error(kLayout) for a source that holds them quantised, or in parts that are no boxes.
void separate_experts(Checkpoint& checkpoint, std::vector<distckpt::ModelTensor>& tensors);

// Gives the experts of a checkpoint the form that `like`, one of the same model, has them in. True
// if it was another. Throws Error(kLayout) as above, and for experts that are not all there; the
// checkpoint is then as it was.
bool take_experts_form(const ModelMap& like, Checkpoint& checkpoint);

}  // namespace ferry::converter
