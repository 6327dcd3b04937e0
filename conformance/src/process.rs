//! The driver's process: started, ended, and all that it began with it.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

/// Size of the end of a driver's output that is kept.
const OUTPUT_BYTES: usize = 16 << 10;
/// Time for reading the remaining output of a process after its end.
const DRAIN: Duration = Duration::from_millis(500);
/// Size of one read.
const READ_BYTES: usize = 8 << 10;

/// Variable in the environment of a driver: its processes are known by it, whatever group and parent they have.
const MARK: &str = "NODEDOCK_CONFORM_DRIVER";

/// Number of the driver that is started next.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// The processes that are to live: their groups, and their marks.
type Live = BTreeMap<i32, String>;

/// Held while a process is started, until it is here, and while others are killed.
static LIVE: Mutex<Live> = Mutex::new(Live::new());

fn live() -> std::sync::MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process in a group of its own. It is killed when it is dropped, with its group and with what left the group. Others may run beside it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    mark: String,
    readers: Vec<tokio::task::JoinHandle<()>>,
}

/// The end of what a process printed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Output(Arc<Mutex<VecDeque<u8>>>);

impl Output {
    pub(crate) fn text(&self) -> String {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(kept.make_contiguous()).into_owned()
    }

    async fn keep(self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend(&buffer[..read]);
            let excess = kept.len().saturating_sub(OUTPUT_BYTES);
            kept.drain(..excess);
        }
    }
}

impl Process {
    pub(crate) fn start(command: &[String], output: &Output) -> Result<Self> {
        // What leaves the process's group becomes a child of this process, which finds it there.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .context("become the reaper of a driver")?;
        let (program, arguments) = command.split_first().context("the command is empty")?;
        let mark = format!(
            "{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let mut command = Command::new(program);
        command.args(arguments).env(MARK, &mark);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut live = live();
        let mut child = command
            .spawn()
            .with_context(|| format!("start {program}"))?;
        let pid = child
            .id()
            .and_then(|pid| Pid::from_raw(pid.cast_signed()))
            .context("the process has no ID")?;
        live.insert(pid.as_raw_nonzero().get(), mark.clone());
        drop(live);
        let stdout = child
            .stdout
            .take()
            .map(|stdout| tokio::spawn(output.clone().keep(stdout)));
        let stderr = child
            .stderr
            .take()
            .map(|stderr| tokio::spawn(output.clone().keep(stderr)));
        Ok(Self {
            child,
            pid,
            mark,
            readers: stdout.into_iter().chain(stderr).collect(),
        })
    }

    /// Returns the exit status of the process if it has ended, after reading all its output.
    pub(crate) async fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        // What it has left behind may hold its output open.
        let _ =
            tokio::time::timeout(DRAIN, futures::future::join_all(self.readers.drain(..))).await;
        Some(status)
    }

    pub(crate) async fn kill(mut self) {
        self.end_group();
        let _ = self.child.wait().await;
        self.kill_orphans();
    }

    /// Kills what is left of the group.
    fn end_group(&self) {
        live().remove(&self.pid.as_raw_nonzero().get());
        // There may be none any more.
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
    }

    /// Kills what left the group, and, when no driver lives, processes of which it is not known who started them.
    fn kill_orphans(&self) {
        let live = live();
        // One that is killed leaves its own children to this process.
        for _ in 0..8 {
            let left = processes(|pid, stat| {
                is_left(stat)
                    && !live.contains_key(&stat.group.as_raw_nonzero().get())
                    && (stat.group == self.pid || is_of(pid, &self.mark, live.is_empty()))
            });
            if left.is_empty() {
                return;
            }
            for pid in left {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            }
        }
    }

    /// Ends it with SIGTERM.
    ///
    /// # Errors
    ///
    /// It did not end in time, and was killed.
    pub(crate) async fn stop(mut self, time: Duration) -> Result<()> {
        let _ = rustix::process::kill_process(self.pid, Signal::TERM);
        let ended = tokio::time::timeout(time, self.child.wait()).await;
        self.end_group();
        let _ = self.child.wait().await;
        self.kill_orphans();
        match ended {
            Ok(_) => Ok(()),
            Err(_) => bail!("the driver did not end within {time:?} of SIGTERM"),
        }
    }

    /// Resident memory in bytes and open files, of it, of its group and of what left the group; `None`: they cannot be read.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let mut usage = Usage::default();
        let is_alone = live().len() == 1;
        let pids = processes(|pid, stat| {
            stat.group == self.pid || (is_left(stat) && is_of(pid, &self.mark, is_alone))
        });
        for pid in pids {
            match Usage::of(pid) {
                Some(own) => {
                    usage.memory += own.memory;
                    usage.files += own.files;
                }
                // It has just ended, and takes nothing.
                None if stat(pid).is_none() => {}
                None => return None,
            }
        }
        (usage.memory > 0).then_some(usage)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) memory: u64,
    pub(crate) files: usize,
}

impl Usage {
    /// `None`: it cannot be read, or the process has ended.
    fn of(pid: Pid) -> Option<Self> {
        let directory = format!("/proc/{}", pid.as_raw_nonzero());
        // no error: the caller looks whether the process is still there
        let status = std::fs::read_to_string(format!("{directory}/status")).ok()?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        // One that has ended and was not waited for has none.
        let resident =
            resident.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        // no error: the same
        let files = std::fs::read_dir(format!("{directory}/fd")).ok()?;
        Some(Self {
            memory: resident.unwrap_or_default() << 10,
            files: files.count(),
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end_group();
        let _ = self.child.start_kill();
        self.kill_orphans();
    }
}

/// Describes the end of a process in words.
pub(crate) fn end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with exit code {code}"),
        (_, Some(signal)) => format!("it was ended by signal {signal}"),
        _ => "it ended".to_owned(),
    }
}

/// Returns whether a process is a child of this one, in a session or a group that is not its own.
fn is_left(stat: &Stat) -> bool {
    stat.parent == rustix::process::getpid() && stat.group != rustix::process::getpgrp()
}

/// Returns whether a process descends from the driver with a mark. `unknown`: the answer for a process that has none, as its environment is
/// not the driver's.
fn is_of(pid: Pid, mark: &str, unknown: bool) -> bool {
    // no error: the process has ended, or hides its environment, which is the same as having another one
    let environment =
        std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap_or_default();
    let mut variables = environment.split(|byte| *byte == 0);
    let found = variables.find_map(|text| {
        let text = text.strip_prefix(MARK.as_bytes())?;
        text.strip_prefix(b"=")
    });
    found.map_or(unknown, |found| found == mark.as_bytes())
}

struct Stat {
    parent: Pid,
    group: Pid,
}

fn processes(is_meant: impl Fn(Pid, &Stat) -> bool) -> Vec<Pid> {
    // no error: every Linux has it, and processes end while it is listed
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
        .filter(|pid| stat(*pid).is_some_and(|stat| is_meant(*pid, &stat)))
        .collect()
}

/// proc(5): `PID (NAME) STATE PARENT GROUP …`; a name may have spaces and parentheses.
fn stat(pid: Pid) -> Option<Stat> {
    // no error: the process has ended
    let text = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let fields = text.rsplit_once(") ")?.1.split(' ').skip(1);
    let mut ids = fields.map_while(|field| Pid::from_raw(field.parse().ok()?));
    Some(Stat {
        parent: ids.next()?,
        group: ids.next()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The processes of a test are orphans to another.
    static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

    fn shell(script: &str) -> (Process, Output) {
        let output = Output::default();
        let command = ["sh", "-c", script].map(str::to_owned);
        (Process::start(&command, &output).unwrap(), output)
    }

    fn alive(pid: i32) -> bool {
        stat(Pid::from_raw(pid).unwrap()).is_some()
    }

    async fn pid_in(output: &Output) -> i32 {
        loop {
            if let Some(pid) = output
                .text()
                .split_once('\n')
                .and_then(|(line, _)| line.parse().ok())
            {
                return pid;
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn descendants_in_other_sessions_are_killed() {
        let _alone = ALONE.lock().await;
        let (process, output) = shell("setsid sh -c 'echo $$; exec sleep 600' & sleep 600");
        let pid = pid_in(&output).await;
        assert!(alive(pid) && process.usage().is_some());
        process.kill().await;
        assert!(!alive(pid));
    }

    /// Each has a process that left its group and has lost its parent.
    #[tokio::test]
    async fn end_of_driver_spares_others_descendants() {
        const SCRIPT: &str = "(setsid sh -c 'echo $$; exec sleep 600' &); exec sleep 600";
        let _alone = ALONE.lock().await;
        let [(one, first), (other, second)] = [(); 2].map(|()| shell(SCRIPT));
        let pids = [pid_in(&first).await, pid_in(&second).await];
        for pid in pids {
            while stat(Pid::from_raw(pid).unwrap()).is_some_and(|stat| !is_left(&stat)) {
                tokio::task::yield_now().await;
            }
        }
        let beside = one.usage().unwrap().files;
        other.kill().await;
        assert!(alive(pids[0]) && !alive(pids[1]));
        assert_eq!(one.usage().unwrap().files, beside);
        one.kill().await;
        assert!(!alive(pids[0]));
    }

    #[tokio::test]
    async fn driver_ignoring_sigterm_is_killed() {
        let _alone = ALONE.lock().await;
        let (process, output) = shell("trap '' TERM; echo $$; while true; do sleep 600; done");
        let pid = pid_in(&output).await;
        let error = process.stop(Duration::from_millis(50)).await.unwrap_err();
        assert!(
            error
                .to_string()
                .contains("did not end within 50ms of SIGTERM")
        );
        assert!(!alive(pid));
    }

    #[tokio::test]
    async fn end_of_long_output_is_kept() {
        let _alone = ALONE.lock().await;
        let (mut process, output) = shell("head -c 4000000 /dev/zero | tr '\\0' x; echo end");
        while process.ended().await.is_none() || !output.text().ends_with("end\n") {
            tokio::task::yield_now().await;
        }
        assert_eq!(output.text().len(), OUTPUT_BYTES);
        let status = process.ended().await.unwrap();
        assert_eq!(end(status), "it ended with exit code 0");
    }
}
