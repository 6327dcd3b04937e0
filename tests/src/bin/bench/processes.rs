//! A message to another process and its answer: what each function of the host would cost if drivers ran in a process of their own.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Size;
use crate::table::{Table, Times};

/// Bytes of a message: a path below `/sys`, or a value.
const MESSAGE: [u8; 64] = [b'x'; 64];
/// Messages for each request of the other sections, which take longer.
const MESSAGES_PER_REQUEST: usize = 5;

pub(crate) async fn run(size: Size, table: &mut Table) {
    // Which CPU a thread has is the thread's own, so it is one that ends.
    let measured =
        tokio::task::spawn_blocking(move || std::thread::spawn(move || measure(size)).join());
    let rows = measured
        .await
        .expect("the thread is waited for")
        .expect("it measures");
    for (row, times) in rows {
        table.times(
            &format!("message to another process and back, {row}"),
            &times,
            "",
            "socket pair, 64 bytes",
        );
    }
}

fn measure(size: Size) -> Vec<(&'static str, Times)> {
    let all = sched_getaffinity(None).expect("a thread has CPUs");
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| all.is_set(*cpu))
        .collect();
    let only = |cpu: usize| {
        let mut one = CpuSet::new();
        one.set(cpu);
        one
    };
    let mut ways = vec![
        ("not pinned", all, all),
        ("both on one CPU", only(cpus[0]), only(cpus[0])),
    ];
    if let Some(second) = cpus.get(1) {
        ways.push(("each on its own CPU", only(cpus[0]), only(*second)));
    }
    let of_way = |(way, own, other): (_, CpuSet, CpuSet)| {
        // A process has the CPUs of the thread that starts it.
        sched_setaffinity(None, &other).expect("one of our CPUs");
        let (mut socket, mut echo) = echo();
        sched_setaffinity(None, &own).expect("one of our CPUs");
        let mut times = Times::default();
        for _ in 0..size.single * MESSAGES_PER_REQUEST {
            let started = Instant::now();
            socket.write_all(&MESSAGE).expect("it reads");
            socket
                .read_exact(&mut [0; MESSAGE.len()])
                .expect("it answers");
            times.add(started.elapsed());
        }
        drop(socket);
        echo.wait().expect("it ends with its input");
        (way, times)
    };
    ways.into_iter().map(of_way).collect()
}

/// A process that sends back what it reads.
fn echo() -> (UnixStream, Child) {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let output = theirs.try_clone().expect("a descriptor");
    let child = Command::new("cat")
        .stdin(OwnedFd::from(theirs))
        .stdout(OwnedFd::from(output))
        .spawn();
    (ours, child.expect("cat is there"))
}
