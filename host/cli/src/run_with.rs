//! `nodedock run-with`: runs a program, such as a container tool, with exclusive devices.
//!
//! The claim belongs to this process and to the program: when both have ended, in any way, the daemon unprepares and deletes it. Processes
//! that the program leaves behind, such as the monitor of a container, become children of this process, which waits for them. Signals that
//! end a program are forwarded as they come, except those that its terminal sends to both.

use std::ffi::OsString;
use std::future::poll_fn;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use futures::FutureExt;
use nodedock_kube::client::ErrorKind;
use nodedock_kube::local::annotation_of;
use rustix::process::{
    Pid, Signal, WaitOptions, getpgid, getpgrp, getpid, kill_process, set_child_subreaper, wait,
};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::local_api::connect;
use super::output::print_error;
use super::owned_claim::{DAEMON_RETRY, DAEMON_WAIT, DeviceWait, OwnedClaim};
use super::{CommandError, Location};
use nodedock_base::process::Process;

/// Tools that take `--device CDI-NAME` behind the command that makes a container.
const TOOLS: [&str; 3] = ["podman", "docker", "nerdctl"];
const TOOL_COMMANDS: [&str; 2] = ["run", "create"];

/// Placeholder for the devices in the arguments of other programs.
const PLACEHOLDER: &str = "{cdi}";
/// The devices in the environment of every program, separated by commas.
const VARIABLE: &str = "NODEDOCK_CDI_DEVICES";

/// Exit code of a shell for a program that cannot be started, and the least one for a program that a signal ended.
const NOT_STARTED: u8 = 127;
const OF_SIGNALS: i32 = 128;

#[derive(Args)]
pub(super) struct RunWithArgs {
    /// DeviceClass of the devices
    #[arg(long, value_name = "NAME")]
    class: String,
    /// Number of devices
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    count: u32,
    /// CEL expression that each device has to fulfil, such as 'device.capacity["gpu.example.com"].memory.compareTo(quantity("40Gi")) >= 0'; may be given several times
    #[arg(long, value_name = "EXPRESSION")]
    select: Vec<String>,
    #[arg(short, long, value_name = "NAME", default_value = "default")]
    namespace: String,
    /// Seconds to wait for the devices [default: as long as it takes]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// The program with its arguments. podman, docker and nerdctl get --device; in others {cdi} is replaced by the devices
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Args)]
pub(super) struct HoldArgs {
    namespace: String,
    claim: String,
    uid: String,
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

pub(super) async fn run(location: &Location, args: RunWithArgs) -> Result<()> {
    // Before anything is made: what cannot be started has no use for a device.
    with_devices(&args.program, &[])?;
    let client = connect(location).await?;
    let process = Process::this().context("identify this process")?;
    let mut signals = StopSignals::new()?;
    let owner = [annotation_of(&process)];
    let claim = OwnedClaim::make(&client, &args.namespace, "run-with", &owner, spec_of(&args))
        .await
        .context("make a claim")?;
    let wait = DeviceWait {
        most: args.timeout.map(Duration::from_secs),
        is_reported: true,
    };
    let prepared = tokio::select! {
        prepared = claim.prepare(location, &client, None, wait) => prepared,
        signal = signals.received() => {
            Err(CommandError::Ended { code: exit_code(OF_SIGNALS + signal.as_raw()) }.into())
        }
    };
    let mut own = vec![process.pid];
    let ended = match prepared {
        Ok(devices) => run_program(location, &args, &claim, &devices, signals, &mut own).await,
        Err(error) => Err(error),
    };
    match claim.has_others(&client, &own).await {
        // The daemon ends it with the last container.
        Ok(true) => {}
        Ok(false) => claim.end(location, &client).await,
        Err(error) => print_error(&format!(
            "warning: the daemon ends claim {}: {error:#}",
            claim.name()
        )),
    }
    match ended? {
        0 => Ok(()),
        code => Err(CommandError::Ended { code }.into()),
    }
}

fn spec_of(args: &RunWithArgs) -> Value {
    let selectors = args
        .select
        .iter()
        .map(|expression| json!({ "cel": { "expression": expression } }));
    let exactly = json!({
        "deviceClassName": args.class, "allocationMode": "ExactCount", "count": args.count,
        "selectors": selectors.collect::<Vec<_>>(),
    });
    json!({ "devices": { "requests": [{ "name": "devices", "exactly": exactly }] } })
}

/// Runs the program, and waits for it and, unless it is a container tool, for what it left behind. Returns its exit code, and adds its number to
/// `own`.
async fn run_program(
    location: &Location,
    args: &RunWithArgs,
    claim: &OwnedClaim,
    devices: &[String],
    mut signals: StopSignals,
    own: &mut Vec<i32>,
) -> Result<u8> {
    set_child_subreaper(Some(getpid()))
        .context("become the parent of what the program leaves behind")?;
    let mut program = Command::new(std::env::current_exe().context("find this program")?);
    program.arg("--root").arg(&location.root);
    if let Some(socket) = &location.socket {
        program.arg("--socket").arg(socket);
    }
    program.arg("internal-hold");
    program.args([
        claim.id.namespace.as_str(),
        claim.id.name.as_str(),
        claim.id.uid.as_str(),
        "--",
    ]);
    program
        .args(with_devices(&args.program, devices)?)
        .env(VARIABLE, devices.join(","));
    if let Some(signal) = signals.received().now_or_never() {
        // One that came while the devices were prepared.
        return Ok(exit_code(OF_SIGNALS + signal.as_raw()));
    }
    let child = program.spawn().context("start the program")?;
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .context("the program has no number")?;
    own.push(pid.as_raw_nonzero().get());
    // The claim follows the containers of a container tool, which leaves processes of its own behind.
    let waits_for_all = tool_of(&args.program).is_none();
    let mut all = tokio::task::spawn_blocking(move || wait_for(pid, waits_for_all));
    loop {
        tokio::select! {
            ended = &mut all => return ended.context("wait for the program"),
            signal = signals.received() => {
                // The terminal has sent it to all of this process group as well, where each decides what it means.
                let is_of_terminal = signal == Signal::INT && is_foreground();
                let children = children().unwrap_or_else(|error| {
                    tracing::warn!(%error, "what the program left behind cannot be listed, and gets no signal");
                    vec![pid]
                });
                for child in children {
                    if is_of_terminal && getpgid(Some(child)) == Ok(getpgrp()) {
                        continue;
                    }
                    // It may have ended.
                    let _ = kill_process(child, signal);
                }
            }
        }
    }
}

/// The signals that end a program, without those that were ignored before this one began, as by `nohup`: its program ignores them as well.
struct StopSignals(Vec<(Signal, tokio::signal::unix::Signal)>);

impl StopSignals {
    fn new() -> Result<Self> {
        let ignored =
            std::fs::read_to_string("/proc/self/status").context("read the ignored signals")?;
        let ignored = ignored
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = ignored
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .unwrap_or_default();
        let heeded = [Signal::TERM, Signal::INT, Signal::HUP].into_iter();
        let heeded = heeded.filter(|signal| ignored & (1 << (signal.as_raw() - 1)) == 0);
        heeded
            .map(|heeded| {
                let kind = SignalKind::from_raw(heeded.as_raw());
                Ok((heeded, signal(kind).context("listen for signals")?))
            })
            .collect::<Result<_>>()
            .map(Self)
    }

    /// The next one. One that is not received yet is not lost.
    async fn received(&mut self) -> Signal {
        poll_fn(|context| {
            let mut all = self.0.iter_mut();
            let ready = all.find_map(|(signal, stream)| match stream.poll_recv(context) {
                Poll::Ready(Some(())) => Some(*signal),
                Poll::Ready(None) | Poll::Pending => None,
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Returns whether this process is in the foreground of its terminal, which sends its signals to all of its process group.
fn is_foreground() -> bool {
    // Behind the name: state, parent, process group, session, terminal, and the terminal's foreground process group; -1 without a terminal.
    // no error: then each process gets the signal from here, some of them twice
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let mut fields = stat
        .rsplit_once(')')
        .map_or("", |(_, fields)| fields)
        .split_ascii_whitespace()
        .skip(2);
    let (group, foreground) = (fields.next(), fields.nth(2));
    group.is_some() && group == foreground
}

/// The program, and what was left behind. They are children until they are waited for, so no other process has their numbers.
fn children() -> std::io::Result<Vec<Pid>> {
    let mut children = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task")? {
        let list = match std::fs::read_to_string(thread?.path().join("children")) {
            // The thread has ended, and its children are another's.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            list => list?,
        };
        let numbers = list
            .split_ascii_whitespace()
            .filter_map(|number| number.parse().ok());
        children.extend(numbers.filter_map(Pid::from_raw));
    }
    Ok(children)
}

fn exit_code(of: i32) -> u8 {
    u8::try_from(of).unwrap_or(NOT_STARTED)
}

/// Waits for a child, or until there is no child any more, and returns the exit code of the one.
fn wait_for(program: Pid, waits_for_all: bool) -> u8 {
    let mut code = NOT_STARTED;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == program => {
                let ended = status.exit_status().or(status
                    .terminating_signal()
                    .map(|signal| OF_SIGNALS + signal));
                code = ended.map_or(NOT_STARTED, exit_code);
                if !waits_for_all {
                    return code;
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return code,
        }
    }
}

/// Becomes the program, after it was added to the processes of the claim.
pub(super) async fn hold(location: &Location, args: HoldArgs) -> Result<()> {
    let process = Process::this().context("identify this process")?;
    let began = Instant::now();
    loop {
        let added = match connect(location).await {
            Ok(client) => {
                let (key, value) = annotation_of(&process);
                let annotation = [(key, Some(value))];
                match client
                    .annotate(&args.namespace, &args.claim, &args.uid, &annotation)
                    .await
                {
                    // Another claim of its name, or none: it ended before the program began.
                    Err(error)
                        if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Conflict) =>
                    {
                        return Err(
                            anyhow::Error::from(error).context("hold the claim for the program")
                        );
                    }
                    added => added.map_err(anyhow::Error::from),
                }
            }
            Err(error) => Err(error),
        };
        match added {
            Ok(claim)
                if claim
                    .pointer("/metadata/deletionTimestamp")
                    .is_some_and(Value::is_string) =>
            {
                anyhow::bail!(
                    "claim {}/{} ended before the program began",
                    args.namespace,
                    args.claim
                );
            }
            Ok(_) => break,
            Err(_) if began.elapsed() < DAEMON_WAIT => sleep(DAEMON_RETRY).await,
            Err(error) => return Err(error.context("hold the claim for the program")),
        }
    }
    let Some((name, arguments)) = args.program.split_first() else {
        return Ok(());
    };
    let error = Command::new(name).args(arguments).exec();
    print_error(&format!(
        "error: start {}: {error}",
        Path::new(name).display()
    ));
    Err(CommandError::Ended { code: NOT_STARTED }.into())
}

/// Returns the container tool that a program is, if its devices are added to its arguments.
fn tool_of(program: &[OsString]) -> Option<&str> {
    if program.iter().any(has_placeholder) {
        return None;
    }
    let tool = Path::new(program.first()?).file_name()?.to_str()?;
    TOOLS.contains(&tool).then_some(tool)
}

fn has_placeholder(argument: &OsString) -> bool {
    argument
        .to_str()
        .is_some_and(|text| text.contains(PLACEHOLDER))
}

/// The program with the devices among its arguments.
fn with_devices(program: &[OsString], devices: &[String]) -> Result<Vec<OsString>, CommandError> {
    if program.iter().any(has_placeholder) {
        let placed = program.iter().flat_map(|argument| match argument.to_str() {
            Some(PLACEHOLDER) => vec![OsString::from(devices.join(","))],
            Some(text) if text.contains(PLACEHOLDER) => devices
                .iter()
                .map(|device| OsString::from(text.replace(PLACEHOLDER, device)))
                .collect(),
            _ => vec![argument.clone()],
        });
        return Ok(placed.collect());
    }
    let Some(tool) = tool_of(program) else {
        return Ok(program.to_vec());
    };
    let (name, arguments) = program.split_at(1);
    let is_command = |argument: &OsString| {
        argument
            .to_str()
            .is_some_and(|text| TOOL_COMMANDS.contains(&text))
    };
    let Some(at) = arguments.iter().position(is_command) else {
        let hint =
            format!("write {PLACEHOLDER} where the devices belong, such as --device={PLACEHOLDER}");
        return Err(CommandError::usage(
            format!("there is no `{tool} run` among the arguments"),
            hint,
        ));
    };
    let (before, after) = arguments.split_at(at + 1);
    let named = devices
        .iter()
        .flat_map(|device| [OsString::from("--device"), OsString::from(device)]);
    let before = name.iter().chain(before).cloned();
    Ok(before.chain(named).chain(after.iter().cloned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(program: &[&str]) -> Vec<String> {
        let program: Vec<OsString> = program.iter().map(OsString::from).collect();
        let devices = ["v/c=a".to_owned(), "v/c=b".to_owned()];
        let placed = with_devices(&program, &devices).unwrap();
        placed
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect()
    }

    #[test]
    fn devices_are_placed_behind_the_command() {
        assert_eq!(
            placed(&[
                "/usr/bin/podman",
                "--runtime",
                "runc",
                "run",
                "--rm",
                "image",
                "run"
            ]),
            [
                "/usr/bin/podman",
                "--runtime",
                "runc",
                "run",
                "--device",
                "v/c=a",
                "--device",
                "v/c=b",
                "--rm",
                "image",
                "run"
            ]
        );
        assert_eq!(
            placed(&["x", "--device={cdi}", "y"]),
            ["x", "--device=v/c=a", "--device=v/c=b", "y"]
        );
        assert_eq!(
            placed(&["x", "--devices", "{cdi}"]),
            ["x", "--devices", "v/c=a,v/c=b"]
        );
        assert_eq!(
            placed(&["podman", "--x={cdi}", "run"]),
            ["podman", "--x=v/c=a", "--x=v/c=b", "run"]
        );
        assert_eq!(placed(&["sh", "-c", "run"]), ["sh", "-c", "run"]);
    }

    #[test]
    fn tool_without_its_command_is_refused() {
        let error = with_devices(&["docker".into(), "ps".into()], &[]).unwrap_err();
        assert!(error.to_string().contains("docker run"), "{error}");
    }
}
