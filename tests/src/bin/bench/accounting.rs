//! Figures that the kernel has of a process: voluntary switches of its threads, bytes that it has written, calls by which it has read.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::ErrorKind;

use rustix::process::Pid;

/// Bytes that a process has caused to be written to disks, and calls by which it has read anything.
pub(crate) const WRITTEN: &str = "write_bytes: ";
pub(crate) const READS: &str = "syscr: ";
/// Error of the system for a thread that has ended while its file was open.
const NO_SUCH_PROCESS: i32 = rustix::io::Errno::SRCH.raw_os_error();

/// Voluntary switches of the threads of a process, by their IDs.
pub(crate) fn switches(process: Pid) -> BTreeMap<u32, u64> {
    let tasks = format!("/proc/{process}/task");
    let entries = std::fs::read_dir(&tasks).expect("the process runs");
    let mut threads = BTreeMap::new();
    for entry in entries {
        let name = entry.expect("list a directory").file_name();
        let name = name.to_str().expect("threads have numbers");
        let status = match std::fs::read_to_string(format!("{tasks}/{name}/status")) {
            Ok(status) => status,
            // The thread has ended since, and is missed by the caller if it was there before.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(NO_SUCH_PROCESS) => continue,
            Err(error) => panic!("status of thread {name}: {error}"),
        };
        let count = field(&status, "voluntary_ctxt_switches:").expect("the kernel counts switches");
        threads.insert(name.parse().expect("a number"), count);
    }
    threads
}

/// Sum of the switches between two looks. `None`: a thread has ended between, and its count with it. A thread that both started and ended
/// between is not seen here; the system calls have its `clone3`.
pub(crate) fn grown(before: &BTreeMap<u32, u64>, after: &BTreeMap<u32, u64>) -> Option<u64> {
    if before.keys().any(|thread| !after.contains_key(thread)) {
        return None;
    }
    after
        .iter()
        .map(|(thread, count)| count.checked_sub(before.get(thread).copied().unwrap_or(0)))
        .sum()
}

/// A figure of `/proc/PID/io`. `None`: the kernel has no such accounting.
pub(crate) fn accounted(process: impl Display, figure: &str) -> Option<u64> {
    let io = match std::fs::read_to_string(format!("/proc/{process}/io")) {
        Ok(io) => io,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => panic!("accounting of process {process}: {error}"),
    };
    Some(field(&io, figure).expect("the file has the figure"))
}

fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    // no error: the caller says which number is missing
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_thread_voids_a_count() {
        let before = BTreeMap::from([(1, 10), (2, 5)]);
        let after = BTreeMap::from([(1, 12), (2, 5), (3, 4)]);
        assert_eq!(grown(&before, &after), Some(6));
        assert_eq!(grown(&after, &before), None);
        let reused = BTreeMap::from([(1, 12), (2, 1)]);
        assert_eq!(grown(&before, &reused), None);
    }

    #[test]
    fn own_thread_is_counted() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let counted = switches(rustix::process::getpid());
        assert!(counted.contains_key(&u32::try_from(thread).unwrap()));
    }
}
