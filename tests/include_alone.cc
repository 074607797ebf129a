// Compiled once per header: it must compile alone, and a second time change nothing.
#include HEADER
#include HEADER

int main() {
  return 0;
}
