//! Processes that something belongs to until they end, also over restarts of the daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, getpid, getrlimit, pidfd_open, setrlimit,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

/// Field of `/proc/PID/stat` with the start of the process, in clock ticks since the boot: the 22nd, and the first after the command's name
/// is the third (proc_pid_stat(5)).
const START_AFTER_NAME: usize = 22 - 3;

/// Pause between looks, doubled up to the second, at the control group of a container whose first process has ended. The kernel ends the others with it unless the
/// container has the PID namespace of the node; version 1 of control groups reports nothing.
const GROUP_LOOK_MIN: Duration = Duration::from_millis(2);
const GROUP_LOOK_MAX: Duration = Duration::from_millis(200);

/// Directory of the control groups, with one for each controller in version 1.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// A process, which no other one is taken for: its number may be given again, its start may not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    pub pid: i32,
    /// Clock ticks since the boot.
    pub start: u64,
    pub boot_id: String,
    /// Inode of the namespace that the number belongs to.
    pub pid_namespace: u64,
    /// The process counts as running until no process of this group is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control_group: Option<ControlGroup>,
}

/// A control group, which no later one with its name is taken for, as that of a container which is started again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ControlGroup {
    directory: PathBuf,
    inode: u64,
}

/// Why the end of a process is not known.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("process {0} is in another PID namespace than this one: its end cannot be seen here")]
    OtherNamespace(i32),
    #[error("look at process {pid}")]
    Io { pid: i32, source: io::Error },
}

fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

fn own_namespace() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

/// `None`: there is no such process, or it has ended and its parent has not noticed.
fn start_of(pid: i32) -> io::Result<Option<u64>> {
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    // The name may have spaces and parentheses.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let mut fields = fields.split_ascii_whitespace();
    if fields.clone().next() == Some("Z") {
        return Ok(None);
    }
    let start = fields
        .nth(START_AFTER_NAME)
        .and_then(|start| start.parse().ok());
    start
        .map(Some)
        .ok_or_else(|| io::Error::other("its stat has no start"))
}

impl ControlGroup {
    /// Returns the control group in a file such as `/proc/self/cgroup` (cgroups(7)): of version 2, or of the controller of devices, with which
    /// every container runtime limits a container.
    fn of(file: &str) -> io::Result<Option<Self>> {
        let text = std::fs::read_to_string(file)?;
        match Self::of_controller(&text, "devices", "devices")? {
            None => Self::of_controller(&text, "", ""),
            group => Ok(group),
        }
    }

    /// Returns the group of a controller, empty for version 2, below its mount.
    fn of_controller(text: &str, controller: &str, mount: &str) -> io::Result<Option<Self>> {
        let path = text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let mut controllers = controllers.split(',');
            controllers.any(|one| one == controller).then_some(path)
        });
        let Some(path) = path else {
            return Ok(None);
        };
        let directory = Path::new(CONTROL_GROUPS)
            .join(mount)
            .join(path.trim_start_matches('/'));
        match std::fs::metadata(&directory) {
            Ok(found) => Ok(Some(Self {
                inode: found.ino(),
                directory,
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether the group or one below it has processes.
    fn has_processes(&self) -> io::Result<bool> {
        let mut parts = self.directory.components();
        let is_below = self.directory.starts_with(CONTROL_GROUPS)
            && !parts.any(|part| part == Component::ParentDir);
        if !is_below {
            let shown = self.directory.display();
            return Err(io::Error::other(format!("{shown} is no control group")));
        }
        match std::fs::metadata(&self.directory) {
            Ok(found) if found.ino() == self.inode => has_processes(&self.directory),
            Ok(_) => Ok(false),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether a control group was removed, also while it is read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

fn has_processes(group: &Path) -> io::Result<bool> {
    match std::fs::read_to_string(group.join("cgroup.procs")) {
        Ok(processes) if !processes.is_empty() => return Ok(true),
        Err(error) if !is_gone(&error) => return Err(error),
        _ => {}
    }
    let below = match std::fs::read_dir(group) {
        Err(error) if is_gone(&error) => return Ok(false),
        below => below?,
    };
    for entry in below {
        let entry = entry?;
        if entry.file_type()?.is_dir() && has_processes(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Raises the number of files that this process may have open to the most that it may set. The soft limit is usually 1024, for programs that
/// use select(2).
///
/// # Errors
///
/// The kernel refuses it.
pub fn raise_open_files_max() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    )?)
}

impl Process {
    /// Returns this process.
    ///
    /// # Errors
    ///
    /// `/proc` is not there.
    pub fn this() -> io::Result<Self> {
        Self::with_number(getpid().as_raw_nonzero().get())
    }

    /// Returns the process with a number of this process's PID namespace.
    ///
    /// # Errors
    ///
    /// There is no such process.
    pub fn with_number(pid: i32) -> io::Result<Self> {
        let start =
            start_of(pid)?.ok_or_else(|| io::Error::other(format!("there is no process {pid}")))?;
        Ok(Self {
            pid,
            start,
            boot_id: boot_id()?,
            pid_namespace: own_namespace()?,
            control_group: None,
        })
    }

    /// Returns the first process of a container: it has ended when no process of its control group is left. A container in the control group of
    /// this process has none of its own.
    ///
    /// # Errors
    ///
    /// There is no such process.
    pub fn of_container(pid: i32) -> io::Result<Self> {
        let group = ControlGroup::of(&format!("/proc/{pid}/cgroup"))?;
        let is_own = group == ControlGroup::of("/proc/self/cgroup")?;
        Ok(Self {
            control_group: group.filter(|_| !is_own),
            ..Self::with_number(pid)?
        })
    }

    /// Returns whether the process runs, or another one of its control group.
    ///
    /// # Errors
    ///
    /// `/proc` or the control group cannot be read.
    pub fn is_running(&self) -> io::Result<bool> {
        if self.boot_id != boot_id()? {
            return Ok(false);
        }
        let group = self.control_group.as_ref();
        Ok(start_of(self.pid)? == Some(self.start)
            || group.map_or(Ok(false), ControlGroup::has_processes)?)
    }

    /// Resolves when the process has ended, and every process of its control group.
    ///
    /// # Errors
    ///
    /// Its end cannot be seen from here.
    pub async fn ended(&self) -> Result<(), ProcessError> {
        self.first_ended().await?;
        let Some(group) = &self.control_group else {
            return Ok(());
        };
        let mut pause = GROUP_LOOK_MIN;
        // A group of another boot is another one.
        while self.is_of_this_boot()?
            && group
                .has_processes()
                .map_err(|source| self.failed(source))?
        {
            sleep(pause).await;
            pause = (pause * 2).min(GROUP_LOOK_MAX);
        }
        Ok(())
    }

    fn is_of_this_boot(&self) -> Result<bool, ProcessError> {
        let boot = boot_id().map_err(|source| self.failed(source))?;
        Ok(self.boot_id == boot)
    }

    async fn first_ended(&self) -> Result<(), ProcessError> {
        if !self.is_of_this_boot()? {
            return Ok(());
        }
        if self.pid_namespace != own_namespace().map_err(|source| self.failed(source))? {
            return Err(ProcessError::OtherNamespace(self.pid));
        }
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(());
        };
        // The number may be that of another program's thread by now, for which there is no descriptor.
        if start_of(self.pid).map_err(|source| self.failed(source))? != Some(self.start) {
            return Ok(());
        }
        let descriptor: OwnedFd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            Err(error) => return Err(self.failed(error.into())),
        };
        // The descriptor is open by now: if the start is right, it is the process and not a later one.
        if start_of(self.pid).map_err(|source| self.failed(source))? != Some(self.start) {
            return Ok(());
        }
        // SAFETY: an `OwnedFd` is open, and the same one, until it is dropped, which the `AsyncFd` does.
        let descriptor =
            unsafe { AsyncFd::register(descriptor) }.map_err(|error| self.failed(error.into()))?;
        // It becomes readable once, and is not read.
        descriptor
            .readable()
            .await
            .map_err(|source| self.failed(source))?
            .retain_ready();
        Ok(())
    }

    fn failed(&self, source: io::Error) -> ProcessError {
        ProcessError::Io {
            pid: self.pid,
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use futures::FutureExt;

    use super::*;

    #[test]
    fn control_groups_are_known_by_inode() {
        let text = "5:devices:/no/such/group\n1:name=systemd:/x\n0::/\n";
        assert_eq!(
            ControlGroup::of_controller(text, "devices", "devices").unwrap(),
            None
        );
        assert_eq!(
            ControlGroup::of_controller(text, "memory", "memory").unwrap(),
            None
        );
        let root = ControlGroup::of_controller(text, "", "").unwrap().unwrap();
        assert_eq!(root.directory, Path::new("/sys/fs/cgroup"));
        let later = ControlGroup {
            inode: root.inode + 1,
            ..root
        };
        assert!(!later.has_processes().unwrap());
        for wrong in ["/etc", "/sys/fs/cgroup/../..", "relative"] {
            let group = ControlGroup {
                directory: wrong.into(),
                inode: 1,
            };
            assert!(group.has_processes().is_err(), "{wrong}");
        }
    }

    #[test]
    fn open_file_limit_is_raised() {
        let before = getrlimit(Resource::Nofile);
        let fewer = before.current.map_or(256, |now| now.min(256));
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(fewer),
                ..before
            },
        )
        .unwrap();
        raise_open_files_max().unwrap();
        assert_eq!(
            getrlimit(Resource::Nofile),
            Rlimit {
                current: before.maximum,
                ..before
            }
        );
    }

    #[tokio::test]
    async fn pid_reuse_hides_no_process_end() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let this = Process::this().unwrap();
        let process = Process {
            pid,
            start: start_of(pid).unwrap().unwrap(),
            ..this.clone()
        };
        let text = serde_json::to_string(&process).unwrap();
        assert_eq!(serde_json::from_str::<Process>(&text).unwrap(), process);
        assert!(process.ended().now_or_never().is_none(), "it runs");
        let (earlier, rebooted) = (
            Process {
                start: process.start - 1,
                ..process.clone()
            },
            Process {
                boot_id: "other".into(),
                ..process.clone()
            },
        );
        assert!(earlier.ended().now_or_never().unwrap().is_ok());
        assert!(rebooted.ended().now_or_never().unwrap().is_ok());
        let elsewhere = Process {
            pid_namespace: 1,
            ..process.clone()
        };
        assert!(matches!(
            elsewhere.ended().await,
            Err(ProcessError::OtherNamespace(_))
        ));
        drop(child.stdin.take());
        process.ended().await.unwrap();
        child.wait().unwrap();
        process.ended().await.unwrap();
        assert!(this.ended().now_or_never().is_none());
    }
}
