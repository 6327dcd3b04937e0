//! The daemon of the demo: on a temporary root, started, killed, stopped, and always removed.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::answers::Promise;
use super::{command, note, quote};
use crate::shell::{self, Interrupt};

const READY_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const CALL_LIMIT: Duration = Duration::from_secs(60);
const LOG_LINES_SHOWN: usize = 30;
/// The default directory of container runtimes.
const SYSTEM_CDI_DIR: &str = "/var/run/cdi";

pub(super) struct Dock {
    /// The directory of the built programs.
    programs: PathBuf,
    root: TempDir,
    cdi_dir: PathBuf,
    /// Previous content of the CDI directory, which may be the system's.
    cdi_before: BTreeSet<PathBuf>,
    cdi_dir_is_ours: bool,
    daemon: Option<Child>,
    interrupt: Interrupt,
}

pub(super) struct CdiSpec {
    pub(super) path: PathBuf,
    pub(super) text: String,
    pub(super) promise: Promise,
}

impl Dock {
    pub(super) fn new(programs: PathBuf, for_runtimes: bool, interrupt: Interrupt) -> Result<Self> {
        // Paths of Unix sockets have at most 107 bytes, so the root's path must be short.
        let root = tempfile::Builder::new()
            .prefix("nodedock-")
            .tempdir_in("/tmp")
            .context("creating a root")?;
        let cdi_dir = if for_runtimes {
            SYSTEM_CDI_DIR.into()
        } else {
            root.path().join("var/run/cdi")
        };
        let (cdi_dir_is_ours, cdi_before) = (!cdi_dir.exists(), files_in(&cdi_dir));
        let dock = Self {
            programs,
            root,
            cdi_dir,
            cdi_before,
            cdi_dir_is_ours,
            daemon: None,
            interrupt,
        };
        fs::create_dir_all(dock.drivers_dir()).context("creating the drivers directory")?;
        Ok(dock)
    }

    pub(super) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(super) fn drivers_dir(&self) -> PathBuf {
        self.root().join("var/lib/nodedock/drivers")
    }

    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Starts the daemon and waits until it is reachable.
    pub(super) fn start(&mut self) -> Result<()> {
        let mut daemon = Command::new(self.programs.join("nodedockd"));
        daemon
            .arg("run")
            .arg("--root")
            .arg(self.root())
            .arg("--cdi-dir")
            .arg(&self.cdi_dir);
        command(&format!("{} &", shell::line(&daemon)));
        let log = self.open_log()?;
        // A separate process group: Ctrl-C reaches only this program, which then stops the daemon.
        daemon
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        self.daemon = Some(daemon.spawn().context("starting nodedockd")?);
        self.wait_ready()
    }

    fn wait_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        let interrupt = self.interrupt.clone();
        let mut last = String::new();
        let ready = interrupt.wait_for(READY_LIMIT, || {
            if let Some(status) = self.ended()? {
                bail!("the daemon ended before it was ready: {status}");
            }
            let output = interrupt.output(
                &mut self.client(&["get", "drivers", "-o", "json"]),
                READY_LIMIT,
            )?;
            last = text(&output.stderr);
            Ok(output.status.success().then_some(()))
        })?;
        ensure!(
            ready.is_some(),
            "the daemon is not ready after {} s: {last}",
            READY_LIMIT.as_secs()
        );
        note(&format!(
            "ready after {:.2} s",
            began.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    /// Kills the daemon without running its handlers, as a crash does.
    pub(super) fn crash(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("the daemon is not running")?;
        command(&format!("kill -KILL {}", daemon.id()));
        daemon.kill().context("killing the daemon")?;
        daemon.wait().context("waiting for the killed daemon")?;
        Ok(())
    }

    /// Stops the daemon with SIGTERM; it must exit successfully before the deadline.
    pub(super) fn stop(&mut self) -> Result<()> {
        let daemon = self.daemon.as_ref().context("the daemon is not running")?;
        command(&format!("kill -TERM {}", daemon.id()));
        terminate(daemon)?;
        let interrupt = self.interrupt.clone();
        let status = interrupt.wait_for(STOP_LIMIT, || self.ended())?;
        let status = status
            .with_context(|| format!("still running {} s after SIGTERM", STOP_LIMIT.as_secs()))?;
        self.daemon = None;
        ensure!(status.success(), "the daemon ended with {status}");
        note("it ended with exit code 0");
        Ok(())
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let daemon = self.daemon.as_mut().context("the daemon is not running")?;
        daemon
            .try_wait()
            .context("getting the status of the daemon")
    }

    /// Runs a command against the daemon, prints it with its output, and returns the output.
    pub(super) fn show(&self, args: &[&str]) -> Result<String> {
        command(&format!("nodedock {}", args.join(" ")));
        let answer = self.query(args)?;
        quote(&answer);
        Ok(answer)
    }

    /// Runs a command against the daemon and returns its output.
    pub(super) fn query(&self, args: &[&str]) -> Result<String> {
        let output = self.interrupt.output(&mut self.client(args), CALL_LIMIT)?;
        let problem = text(&output.stderr);
        ensure!(
            output.status.success(),
            "nodedock {} failed: {}: {problem}",
            args.join(" "),
            output.status
        );
        String::from_utf8(output.stdout)
            .with_context(|| format!("reading nodedock {}", args.join(" ")))
    }

    /// The environment sets the root, so that the printed command is the one for a real node.
    fn client(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("nodedock"));
        command.args(args).env("NODEDOCK_ROOT", self.root());
        command
    }

    /// Returns the spec of the first device, with the effects of the specs of all devices.
    pub(super) fn cdi_spec(&self, devices: &[&str]) -> Result<CdiSpec> {
        let specs: Vec<_> = devices
            .iter()
            .map(|device| self.spec_of(device))
            .collect::<Result<_>>()?;
        let mut specs = specs.into_iter();
        let mut first = specs.next().context("no CDI device was prepared")?;
        specs.for_each(|spec| first.promise.add(spec.promise));
        Ok(first)
    }

    fn spec_of(&self, device: &str) -> Result<CdiSpec> {
        let found = files_in(&self.cdi_dir).into_iter().find_map(|path| {
            let text = fs::read_to_string(&path).ok()?;
            let promise = Promise::read(&text, device)?;
            Some(CdiSpec {
                path,
                text,
                promise,
            })
        });
        found.with_context(|| format!("no file in {} describes {device}", self.cdi_dir.display()))
    }

    fn log_path(&self) -> PathBuf {
        self.root().join("nodedock.log")
    }

    fn open_log(&self) -> Result<File> {
        let log = self.log_path();
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))
    }

    pub(super) fn show_log(&self) {
        let bytes = fs::read(self.log_path()).unwrap_or_default();
        let log = text(&bytes);
        let lines: Vec<_> = log.lines().collect();
        println!("\n  the daemon's last log lines:");
        for line in &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..] {
            println!("    {line}");
        }
    }

    /// Stops the daemon if it still runs and removes all files; fails if a file cannot be removed.
    pub(super) fn remove(mut self) -> Result<()> {
        self.clean();
        let root = self.root().to_owned();
        drop(self);
        ensure!(!root.exists(), "{} could not be removed", root.display());
        Ok(())
    }

    fn clean(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // After a failure a clean stop is not needed.
            shell::end(&mut daemon);
        }
        self.remove_cdi_leftovers();
    }

    /// Removes only new files of this daemon: the directory may be the system's.
    fn remove_cdi_leftovers(&self) {
        for file in files_in(&self.cdi_dir)
            .difference(&self.cdi_before)
            .filter(|file| names_us(file))
        {
            if let Err(error) = fs::remove_file(file) {
                eprintln!("  {} was not removed: {error}", file.display());
            }
        }
        if self.cdi_dir_is_ours {
            // Fails, as intended, if another program has created a file there.
            let _ = fs::remove_dir(&self.cdi_dir);
        }
    }
}

impl Drop for Dock {
    fn drop(&mut self) {
        self.clean();
    }
}

fn terminate(daemon: &Child) -> Result<()> {
    let pid = Pid::from_child(daemon);
    kill_process(pid, Signal::TERM).context("sending SIGTERM to the daemon")
}

fn files_in(directory: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect()
}

fn names_us(file: &Path) -> bool {
    let in_name = file
        .file_name()
        .is_some_and(|name| name.to_string_lossy().contains("nodedock"));
    in_name || fs::read(file).is_ok_and(|bytes| text(&bytes).contains("nodedock"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}
