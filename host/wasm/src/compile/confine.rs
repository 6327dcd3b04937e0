//! What a compiler's process gives up before it reads the first byte of a driver: nothing of the node is left to it but three
//! pipes, a core for some time, and some memory.

use std::io;

use rustix::process::{Pid, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::CompileBounds;

/// `nobody`, on every Linux.
const NOBODY: u32 = 65534;
/// Standard input, output and error.
const PIPES: u64 = 3;
/// Of the main thread: parsers and the compiler follow what is nested by recursion.
const STACK_BYTES: u64 = 16 << 20;
/// From the signal that ends a process which has used its CPU to the one that nothing withstands.
const CPU_GRACE_SECONDS: u64 = 5;
/// Everything else on the node comes first.
const NICENESS: i32 = 10;

/// Confines this process, which is expected to be a child of `parent` and to have one thread.
pub(super) fn confine(parent: u32, bounds: &CompileBounds) -> io::Result<()> {
    close_inherited()?;
    rustix::process::chdir("/")?;
    rustix::process::nice(NICENESS)?;
    // Where memory runs out this process goes first. A system without the file has no such choice.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    limit(Resource::Core, 0, 0)?;
    limit(Resource::Fsize, 0, 0)?;
    limit(Resource::Stack, STACK_BYTES, STACK_BYTES)?;
    limit(Resource::As, bounds.memory, bounds.memory)?;
    let seconds = bounds.cpu.as_secs().max(1);
    limit(Resource::Cpu, seconds, seconds + CPU_GRACE_SECONDS)?;
    drop_privileges()?;
    // Neither a process nor a thread, neither a file nor a socket.
    limit(Resource::Nproc, 0, 0)?;
    limit(Resource::Nofile, PIPES, PIPES)?;
    die_with(parent)
}

fn limit(resource: Resource, soft: u64, hard: u64) -> io::Result<()> {
    // One that is lower already stays.
    let hard = rustix::process::getrlimit(resource).maximum.map_or(hard, |now| now.min(hard));
    let limit = Rlimit { current: Some(soft.min(hard)), maximum: Some(hard) };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

/// Files that somebody let us inherit.
fn close_inherited() -> io::Result<()> {
    // SAFETY: nothing in this process owns a file yet but the three pipes (close_range(2)).
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, PIPES, u64::from(u32::MAX), 0) };
    let error = io::Error::last_os_error();
    // Kernels before 5.9; the daemon itself opens all its files so that no child has them.
    if outcome == 0 || error.raw_os_error() == Some(libc::ENOSYS) { Ok(()) } else { Err(error) }
}

/// Another user where there is one, and no capabilities in any case.
fn drop_privileges() -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        let (user, group) = (rustix::process::Uid::from_raw(NOBODY), rustix::process::Gid::from_raw(NOBODY));
        // A container may know no other user, or not be allowed to change: the user stays then, without its powers.
        let _ = rustix::thread::set_thread_groups(&[])
            .and_then(|()| rustix::thread::set_thread_res_gid(group, group, group))
            .and_then(|()| rustix::thread::set_thread_res_uid(user, user, user));
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets)?;
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Comes after the change of user, which takes such a wish back (prctl(2)).
fn die_with(parent: u32) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let is_parent = |pid: Pid| u32::try_from(pid.as_raw_nonzero().get()).is_ok_and(|pid| pid == parent);
    match rustix::process::getppid().is_some_and(is_parent) {
        true => Ok(()),
        false => Err(io::Error::other("the process that wanted the code is gone")),
    }
}
