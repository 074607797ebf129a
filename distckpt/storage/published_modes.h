// Permissions of what is made from files: only users who could read all of these can read it.
#pragma once

#include <filesystem>

namespace ferry::distckpt {

class SourceFiles;

struct PublishedModes {
  unsigned file = 0644;    // of new files
  unsigned folder = 0755;  // of new folders; their owner can always enter and change them

  // Takes away what others may not do with the file or folder at the path; symbolic links are
  // followed. A path of a store, and one that is not there any more, takes nothing away.
  void narrow(const std::filesystem::path& path);
  void narrow(const SourceFiles& files);  // by the permissions that they had

  // The same of a folder and all that lies below it, but for hidden folders (.git, .cache); or of a
  // file and the folder that it lies in.
  void narrow_all(const std::filesystem::path& path);

  // Permissions of a file that is put into a folder with permissions of its own.
  unsigned lone_file() const;
};

}  // namespace ferry::distckpt
