// Lets mpirun listen on the loopback only, for ranks that are all on this machine: Open MPI and Hydra (of
// MPICH and Intel MPI) have no setting for it. The launcher names this library in LD_PRELOAD.
//
// It does nothing in any other program, and ranks do not load it: a task decides itself on which addresses
// it listens.

#include <cstdlib>
#include <cstring>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>  // errno, program_invocation_short_name
#include <netinet/in.h>
#include <sys/socket.h>

namespace {

bool is_launcher = false;

bool begins_with(const char* text, const char* start) { return strncmp(text, start, strlen(start)) == 0; }

// Before main(), with one thread.
__attribute__((constructor)) void begin() {
  const char* name = program_invocation_short_name;
  // Hydra's daemons load this library, too, and an option of Hydra restores LD_PRELOAD for the ranks.
  const bool is_hydra = begins_with(name, "mpiexec.hydra") || begins_with(name, "hydra_");
  // In Open MPI's wheel, mpirun is a program that starts another, orterun_wrapper or prterun.
  const bool is_orte = (begins_with(name, "mpirun") || begins_with(name, "orterun")) &&
                       dlsym(RTLD_DEFAULT, "orte_init");
  const bool is_prrte = dlsym(RTLD_DEFAULT, "prte_init") != nullptr;
  is_launcher = is_hydra || is_orte || is_prrte;
  if (!is_launcher || is_hydra) return;
  // This library is the first; what follows is the user's. Empty, not unset: horovodrun has mpirun pass
  // it on, and mpirun warns of what is not there.
  const char* libraries = getenv("LD_PRELOAD");
  const char* others = libraries ? strchr(libraries, ':') : nullptr;
  setenv("LD_PRELOAD", others ? others + 1 : "", 1);
}

}  // namespace

extern "C" int bind(int socket, const sockaddr* address, socklen_t size_bytes) {
  using Bind = int (*)(int, const sockaddr*, socklen_t);
  static const Bind next = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (!is_launcher || !address) return next(socket, address, size_bytes);
  sockaddr_storage changed = {};
  memcpy(&changed, address, size_bytes < sizeof changed ? size_bytes : sizeof changed);
  auto& v4 = reinterpret_cast<sockaddr_in&>(changed);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(changed);
  if (address->sa_family == AF_INET && v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  } else if (address->sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) {
    v6.sin6_addr = in6addr_loopback;
  } else {
    return next(socket, address, size_bytes);
  }
  const int result = next(socket, reinterpret_cast<sockaddr*>(&changed), size_bytes);
  // Containers often have no ::1, and then no other IPv6 address either.
  const bool is_missing = result != 0 && errno == EADDRNOTAVAIL;
  return is_missing ? next(socket, address, size_bytes) : result;
}
