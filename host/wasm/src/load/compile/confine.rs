//! Drops the compiler process' privileges before it reads the first byte of a driver: it keeps three pipes, some CPU time and some
//! memory.

use std::io;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;

use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::CompileBounds;

/// Users of these processes, one for each, so that no other process can signal or trace it or uses up its number of processes. No
/// distribution, systemd, directory service or container runtime gives numbers of this range to users (`docs/decisions/0004`).
const USERS: RangeInclusive<u32> = 2_147_200_000..=2_147_265_535;
/// User for a user namespace without these numbers, as a container's of 65,536: its other processes are of the same container.
const NOBODY: u32 = 65534;
/// Standard input, output and error.
const PIPES: u64 = 3;
/// Stack of each thread: parsers and the compiler recurse into nested items.
const STACK_BYTES: u64 = 16 << 20;
/// Threads that compile, if there are as many processors: each has its share of the memory.
const THREADS_MAX: usize = 4;
/// Time from SIGXCPU, which ends a process that has used its CPU time, to SIGKILL.
const CPU_GRACE_SECONDS: u64 = 5;
/// Lower priority than anything else on the node.
const NICENESS: i32 = 10;

/// Confines this process, which is expected to be a child of `parent` and to have one thread. Returns whether rayon's global pool has
/// threads to compile on, which are confined as well.
pub(super) fn confine(parent: u32, bounds: &CompileBounds) -> io::Result<bool> {
    close_inherited()?;
    rustix::process::chdir("/")?;
    rustix::process::nice(NICENESS)?;
    // When memory runs out, this process is killed first. Some kernels do not have the file.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    limit(Resource::Core, 0, 0)?;
    limit(Resource::Fsize, 0, 0)?;
    limit(Resource::Stack, STACK_BYTES, STACK_BYTES)?;
    limit(Resource::As, bounds.memory, bounds.memory)?;
    let seconds = bounds.cpu.as_secs().max(1);
    limit(Resource::Cpu, seconds, seconds + CPU_GRACE_SECONDS)?;
    let threads = std::thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(THREADS_MAX);
    drop_privileges()?;
    let parallel = threads > 1 && start(threads).is_ok();
    // No more processes, threads, files or sockets.
    limit(Resource::Nproc, 0, 0)?;
    limit(Resource::Nofile, PIPES, PIPES)?;
    die_with(parent)?;
    Ok(parallel)
}

/// Starts the threads, which inherit what this one has left. Fails if the user has too many processes.
fn start(threads: usize) -> Result<(), rayon::ThreadPoolBuildError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK_BYTES as usize)
        .build_global()
}

fn limit(resource: Resource, soft: u64, hard: u64) -> io::Result<()> {
    // A lower limit stays.
    let hard = rustix::process::getrlimit(resource)
        .maximum
        .map_or(hard, |now| now.min(hard));
    let limit = Rlimit {
        current: Some(soft.min(hard)),
        maximum: Some(hard),
    };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

/// Closes inherited files.
fn close_inherited() -> io::Result<()> {
    // SAFETY: nothing in this process owns a file yet but the three pipes (close_range(2)).
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, PIPES, u64::from(u32::MAX), 0) };
    let error = io::Error::last_os_error();
    // Kernels before 5.9; the daemon itself opens all its files so that no child has them.
    if outcome == 0 || error.raw_os_error() == Some(libc::ENOSYS) {
        Ok(())
    } else {
        Err(error)
    }
}

/// Changes the user where that is possible, and drops all capabilities in any case.
fn drop_privileges() -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        // A container may have no other user, or may not change it: the user stays then, without capabilities.
        let _ = become_user(own_user()?).or_else(|_| become_user(NOBODY));
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    rustix::thread::set_capabilities(None, sets)?;
    Ok(rustix::thread::set_no_new_privs(true)?)
}

fn own_user() -> io::Result<u32> {
    let mut chosen = [0; 2];
    getrandom::fill(&mut chosen).map_err(io::Error::other)?;
    Ok(USERS.start() + u32::from(u16::from_ne_bytes(chosen)))
}

/// Changes the user and the groups. A user that is not changed has its groups no more.
fn become_user(number: u32) -> rustix::io::Result<()> {
    let (user, group) = (
        rustix::process::Uid::from_raw(number),
        rustix::process::Gid::from_raw(number),
    );
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)
}

/// Has to follow the change of user, which clears this setting (prctl(2)).
fn die_with(parent: u32) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let now = rustix::process::getppid().map(|pid| u32::try_from(pid.as_raw_nonzero().get()));
    match now {
        Some(Ok(now)) if now == parent => Ok(()),
        _ => Err(io::Error::other("the parent process is gone")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of users that others give (systemd's UIDS-GIDS, useradd(8), sssd-ldap(5), the unprivileged users of container images).
    const OF_OTHERS: [(&str, RangeInclusive<u32>); 5] = [
        ("16 bits: users, systemd, 65534", 0..=65_535),
        ("subordinate users of containers", 65_536..=600_100_000),
        ("containers of systemd-nspawn", 524_288..=1_879_048_191),
        ("directory services by sssd", 200_000..=2_000_200_000),
        (
            "foreign images, and numbers that some programs read as negative",
            2_147_352_576..=u32::MAX,
        ),
    ];

    #[test]
    fn compiler_user_is_in_unused_range() {
        assert_eq!(USERS.count(), 1 << 16);
        for (whose, range) in OF_OTHERS {
            assert!(
                range.end() < USERS.start() || USERS.end() < range.start(),
                "{whose}"
            );
        }
        let chosen: std::collections::BTreeSet<u32> =
            (0..64).map(|_| own_user().unwrap()).collect();
        assert!(
            chosen.len() > 32 && chosen.iter().all(|user| USERS.contains(user)),
            "{chosen:?}"
        );
    }
}
