//! Counters of calls that no noise changes: voluntary switches of the daemon's threads, bytes that it writes to disks, its system calls.
//!
//! Allocations are not among them: the daemon uses the allocator of the C library, which does not count, and one that does would cost each
//! request of the shipped program something.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use nodedock_tests::DEADLINE;
use nodedock_tests::machine::{program, skip};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::accounting::{WRITTEN, accounted, grown, switches};
use crate::calls::{Calls, ClusterNode, DeviceManager, NodeApi};
use crate::devices::{Node, ORDINARY};
use crate::table::Table;
use crate::{CdiOnTmpfs, Size, claims};

/// Time after an answer in which threads become idle, and work is done that no answer waits for.
const SETTLE: Duration = Duration::from_millis(20);
/// Calls that connect and fill caches, before those that are counted.
const FIRST: usize = 5;
/// By how much counters of the same program differ from run to run at most: of background tasks that fall between.
const SWITCHES_MORE: f64 = 1.0;
const CALLS_MORE: f64 = 1.0;
const SYNCS_MORE: f64 = 0.1;
/// Less than a page.
const KIB_MORE: f64 = 2.0;
/// System calls that wait for a disk.
const SYNCS: [&str; 6] = [
    "fdatasync",
    "fsync",
    "msync",
    "sync",
    "sync_file_range",
    "syncfs",
];
/// System calls of a name per call that the note has at least.
const NOTED: f64 = 0.1;
pub(crate) async fn run(size: Size, table: &mut Table) {
    let cdi = CdiOnTmpfs::new();
    let daemon = claims::daemon(&cdi).await;
    let goals = Goals {
        switches: "goal: 6",
        calls: "goal: 30",
    };
    let mut calls = NodeApi(daemon.client());
    count(daemon.pid(), &mut calls, size, goals, table).await;
    drop(daemon);
    let (node, none) = (ClusterNode::start().await, Goals::default());
    count(node.daemon.pid(), &mut node.dra(), size, none, table).await;
    let mut calls = node.allocate().await;
    count(node.daemon.pid(), &mut calls, size, none, table).await;
    drop((calls, node));
    let node = Node::start(ORDINARY).await;
    let mut calls = DeviceManager(node.client());
    count(node.pid(), &mut calls, size, none, table).await;
}

/// Goals of the call for a pod that comes.
#[derive(Clone, Copy, Default)]
struct Goals {
    switches: &'static str,
    calls: &'static str,
}

/// Counts of each call.
#[derive(Default)]
struct Counts {
    switches: Vec<f64>,
    written: Vec<f64>,
    /// Calls in which a thread has ended.
    left_out: usize,
    /// The kernel does not account for what a process writes.
    unaccounted: bool,
}

impl Counts {
    /// Counts a call and what the process does until it is idle again.
    async fn count(&mut self, process: Pid, call: impl Future<Output = ()>) {
        let (before, written) = (switches(process), accounted(process, WRITTEN));
        call.await;
        tokio::time::sleep(SETTLE).await;
        let (after, written) = (switches(process), (written, accounted(process, WRITTEN)));
        match grown(&before, &after) {
            Some(count) => self.switches.push(count as f64),
            None => self.left_out += 1,
        }
        match written {
            (Some(before), Some(after)) => self.written.push((after - before) as f64 / 1024.0),
            _ => self.unaccounted = true,
        }
    }

    fn rows(self, call: &str, goals: Goals, table: &mut Table) {
        let name = format!("counters: {call}, voluntary switches");
        let note = match self.left_out {
            0 => goals.switches.to_owned(),
            count => format!(
                "{}; without {count} calls in which a thread ended",
                goals.switches
            ),
        };
        if self.switches.is_empty() {
            skip(&name, "a thread ended in each call, and its count with it");
        } else {
            table.counts(
                &name,
                self.switches,
                "switches",
                SWITCHES_MORE,
                note.trim_start_matches("; "),
            );
        }
        let name = format!("counters: {call}, written to disks");
        if self.unaccounted {
            skip(&name, "the kernel does not account for it");
        } else {
            table.counts(&name, self.written, "KiB", KIB_MORE, "");
        }
    }
}

async fn count<C: Calls>(process: Pid, calls: &mut C, size: Size, goals: Goals, table: &mut Table) {
    for n in 0..FIRST {
        calls.make_ready(n);
        calls.come(n).await;
        calls.go(n).await;
    }
    let (mut comes, mut goes) = (Counts::default(), Counts::default());
    let numbers = FIRST..FIRST + size.counted;
    for n in numbers.clone() {
        calls.make_ready(n);
        comes.count(process, calls.come(n)).await;
        if C::GO.is_some() {
            goes.count(process, calls.go(n)).await;
        }
    }
    comes.rows(C::COME, goals, table);
    if let Some(name) = C::GO {
        goes.rows(name, Goals::default(), table);
    }
    // With a tracer the calls are slower, so these are others.
    let numbers = numbers.end..numbers.end + size.counted;
    numbers.clone().for_each(|n| calls.make_ready(n));
    let traced = system_calls(process, async || {
        for n in numbers.clone() {
            calls.come(n).await;
            tokio::time::sleep(SETTLE).await;
        }
    });
    system_call_rows(C::COME, traced.await, size.counted, goals.calls, table);
    let Some(name) = C::GO else { return };
    let traced = system_calls(process, async || {
        for n in numbers.clone() {
            calls.go(n).await;
            tokio::time::sleep(SETTLE).await;
        }
    });
    system_call_rows(name, traced.await, size.counted, "", table);
}

/// Rows of the means of so many calls.
fn system_call_rows(
    call: &str,
    traced: Result<BTreeMap<String, u64>, String>,
    calls: usize,
    goal: &str,
    table: &mut Table,
) {
    let name = format!("counters: {call}, system calls");
    let by_name = match traced {
        Ok(by_name) => by_name,
        Err(why) => return skip(&name, &why),
    };
    let mean = |count: u64| count as f64 / calls as f64;
    let mut most: Vec<_> = by_name
        .iter()
        .map(|(name, count)| (mean(*count), name))
        .filter(|(mean, _)| *mean >= NOTED)
        .collect();
    most.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let noted: Vec<_> = most
        .iter()
        .map(|(mean, name)| format!("{name} {mean:.1}"))
        .collect();
    let note = format!("{goal}; {}", noted.join(", "));
    let all = mean(by_name.values().sum());
    table.counts(
        &name,
        vec![all],
        "calls",
        CALLS_MORE,
        note.trim_start_matches("; "),
    );
    let syncs = SYNCS.iter().filter_map(|name| by_name.get(*name)).sum();
    let name = format!("counters: {call}, syncs");
    table.counts(&name, vec![mean(syncs)], "syncs", SYNCS_MORE, "goal: 1");
}

/// System calls of a process while something is done, by their names. The error says in one line why they are not known.
async fn system_calls(
    process: Pid,
    work: impl AsyncFnOnce(),
) -> Result<BTreeMap<String, u64>, String> {
    let strace = program("strace").ok_or("strace is not installed")?;
    let summary = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let mut command = Command::new(strace);
    command
        .args(["-f", "-c", "-p", &process.to_string(), "-o"])
        .arg(summary.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut tracer = command.spawn().map_err(|error| error.to_string())?;
    let mut messages = BufReader::new(tracer.stderr.take().expect("it is piped")).lines();
    let first = timeout(DEADLINE, messages.next_line())
        .await
        .expect("strace attaches or fails");
    let first = first
        .map_err(|error| error.to_string())?
        .unwrap_or_default();
    if !first.contains(" attached") {
        return Err(format!("strace cannot attach: {first}"));
    }
    work().await;
    let id = tracer.id().expect("it was not waited for");
    let id = i32::try_from(id).expect("process IDs are positive integers of 32 bits");
    let id = Pid::from_raw(id).expect("no process has ID 0");
    kill_process(id, Signal::INT).expect("a child may be signalled");
    let ended = timeout(DEADLINE, tracer.wait()).await;
    ended
        .expect("strace ends")
        .map_err(|error| error.to_string())?;
    let text = std::fs::read_to_string(summary.path()).map_err(|error| error.to_string())?;
    read_summary(&text)
}

/// Reads the table of `strace -c`: calls by name.
fn read_summary(text: &str) -> Result<BTreeMap<String, u64>, String> {
    let is_rule = |line: &&str| line.starts_with("------");
    let mut lines = text.lines().skip_while(|line| !is_rule(line));
    lines.next().ok_or("strace has written no table")?;
    let mut calls = BTreeMap::new();
    for line in lines.take_while(|line| !is_rule(line)) {
        // % time, seconds, usecs/call, calls, errors (which may be empty), syscall
        let fields: Vec<_> = line.split_whitespace().collect();
        let read = match fields[..] {
            [_, _, _, count, name] | [_, _, _, count, _, name] => {
                count.parse::<u64>().map(|count| (name.to_owned(), count))
            }
            _ => return Err(format!("strace has written {line:?}")),
        };
        let (name, count) = read.map_err(|_| format!("strace has written {line:?}"))?;
        calls.insert(name, count);
    }
    Ok(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMMARY: &str = "\
strace: Process 7 detached
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 61.11    0.000022          11         2           fdatasync
 38.89    0.000014           0        20        12 futex
  0.00    0.000000           0         1           write
------ ----------- ----------- --------- --------- ----------------
100.00    0.000036           1        23        12 total
";

    #[test]
    fn calls_of_a_trace_are_counted() {
        let calls = read_summary(SUMMARY).unwrap();
        let wanted = [("fdatasync", 2), ("futex", 20), ("write", 1)];
        let wanted = wanted.map(|(name, count)| (name.to_owned(), count));
        assert_eq!(calls, BTreeMap::from(wanted));
    }

    #[test]
    fn unreadable_trace_is_an_error() {
        assert_eq!(read_summary("").unwrap_err(), "strace has written no table");
        for (from, to) in [("20        12", "many"), ("0.000022          11", "")] {
            let text = SUMMARY.replacen(from, to, 1);
            let error = read_summary(&text).unwrap_err();
            assert!(error.starts_with("strace has written \""), "{error}");
        }
    }
}
