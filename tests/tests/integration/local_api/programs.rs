//! `nodedock run-with`: a device belongs to a program, and to the processes that it leaves behind, for as long as they run, regardless of
//! the processes that are killed.

use std::path::Path;
use std::process::Stdio;

use nodedock_tests::machine::or_skip;
use nodedock_tests::podman::{CDI_DIR, Podman};
use nodedock_tests::{Daemon, Options, Root, children};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use super::{api, machine, machine_with};

const ONE: &str = r#"device.attributes["mock-gpu.nodedock.dev"].index == 0"#;

/// A program that runs with a device, and what it writes.
struct Program {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Processes that a failed test leaves behind have to be killed with it.
impl Drop for Program {
    fn drop(&mut self) {
        let id = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        id.into_iter().for_each(kill_below);
    }
}

fn kill_below(parent: Pid) {
    for child in children(parent) {
        kill_below(child);
        // It may have ended.
        let _ = kill_process(child, Signal::KILL);
    }
}

impl Program {
    fn start(root: &Root, select: &str, arguments: &[&str]) -> Self {
        Self::spawn(root.command(), select, arguments)
    }

    fn spawn(mut command: Command, select: &str, arguments: &[&str]) -> Self {
        command
            .args(["run-with", "--class", "gpu", "--wait-for-missing"])
            .args(["--select", select, "--"])
            .args(arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// One that holds the device until its process is killed, and that process.
    async fn that_stays(root: &Root) -> (Self, Pid) {
        let mut program = Self::start(root, ONE, &["sh", "-c", "echo $$; exec tail -f /dev/null"]);
        let pid = program.line().await.parse().unwrap();
        (program, Pid::from_raw(pid).unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap()).unwrap()
    }

    async fn line(&mut self) -> String {
        let line = timeout(nodedock_tests::DEADLINE, self.lines.next_line()).await;
        line.expect("it writes a line")
            .unwrap()
            .expect("it has not ended")
    }

    async fn ended(&mut self) -> Option<i32> {
        let ended = timeout(nodedock_tests::DEADLINE, self.child.wait()).await;
        ended.expect("it ends").unwrap().code()
    }
}

/// Waits until no claim is left, neither in the API nor prepared.
async fn until_nothing_is_left(daemon: &Daemon) {
    let api = api(daemon).await;
    for claim in api.claims(None).await.unwrap() {
        let of = |field: &str| claim["metadata"][field].as_str().unwrap().to_owned();
        assert!(
            api.until_gone(
                &of("namespace"),
                &of("name"),
                &of("uid"),
                nodedock_tests::DEADLINE
            )
            .await,
            "{claim}"
        );
    }
    daemon.until_no_claims().await;
    daemon.assert_empty().await;
}

/// Fails if another one is in the directory's place, and tells when it begins and ends.
fn alone(order: &Path, name: usize) -> String {
    let (lock, order) = (order.with_extension("lock"), order.display());
    let lock = lock.display();
    format!(
        "mkdir {lock} || exit 9; echo {name} >> {order}; test -n \"$NODEDOCK_CDI_DEVICES\" || exit 8; rmdir {lock}"
    )
}

#[tokio::test]
async fn programs_get_one_device_in_order() {
    let mut daemon = machine().await;
    let order = daemon.path().join("order");
    let (mut holder, held) = Program::that_stays(&daemon).await;
    let mut programs = Vec::new();
    for name in 0..16 {
        let script = alone(&order, name);
        programs.push(Program::start(&daemon, ONE, &["sh", "-c", &script]));
        // Its claim is there before the next one's.
        let api = api(&daemon).await;
        while api.claims(None).await.unwrap().len() < name + 2 {
            tokio::task::yield_now().await;
        }
    }
    daemon.crash().await;
    // One waits for the device no more, and one holds it without its parent.
    kill_process(programs[3].pid(), Signal::KILL).unwrap();
    kill_process(holder.pid(), Signal::KILL).unwrap();
    holder.ended().await;
    daemon.crash().await;
    assert!(!order.exists(), "the device is held");
    kill_process(held, Signal::KILL).unwrap();
    daemon.crash().await;
    let mut codes = Vec::new();
    for program in &mut programs {
        codes.push(program.ended().await);
    }
    let expected: Vec<_> = (0..16).map(|name| (name != 3).then_some(0)).collect();
    assert_eq!(codes, expected, "{}", daemon.log());
    let order = std::fs::read_to_string(order).unwrap();
    let order: Vec<usize> = order.lines().map(|name| name.parse().unwrap()).collect();
    assert_eq!(order, (0..16).filter(|name| *name != 3).collect::<Vec<_>>());
    until_nothing_is_left(&daemon).await;
}

#[tokio::test]
async fn program_keeps_device_without_its_parent() {
    let mut daemon = machine().await;
    let (mut first, program) = Program::that_stays(&daemon).await;
    kill_process(first.pid(), Signal::KILL).unwrap();
    first.ended().await;
    let mut second = Program::start(&daemon, ONE, &["sh", "-c", "echo has"]);
    let waits = api(&daemon).await;
    while waits.claims(None).await.unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
    daemon.crash().await;
    assert_eq!(
        daemon.claims().await.len(),
        1,
        "the first one's is prepared"
    );
    daemon.kill9().await;
    kill_process(program, Signal::KILL).unwrap();
    daemon.run().await;
    assert_eq!(
        (second.line().await.as_str(), second.ended().await),
        ("has", Some(0))
    );
    until_nothing_is_left(&daemon).await;
}

#[derive(Debug, Clone, Copy)]
enum Victim {
    Daemon,
    /// `run-with`.
    Parent,
    Program,
}

#[tokio::test]
async fn killed_processes_free_the_device() {
    use Victim::{Daemon, Parent, Program as Held};
    let mut daemon = machine().await;
    for order in [
        [Daemon, Parent, Held],
        [Daemon, Held, Parent],
        [Parent, Daemon, Held],
        [Parent, Held, Daemon],
        [Held, Daemon, Parent],
        [Held, Parent, Daemon],
    ] {
        let (mut holder, program) = Program::that_stays(&daemon).await;
        let mut next = Program::start(&daemon, ONE, &["sh", "-c", "echo has"]);
        let api = api(&daemon).await;
        while api.claims(None).await.unwrap().len() < 2 {
            tokio::task::yield_now().await;
        }
        for victim in order {
            match victim {
                Daemon => daemon.kill9().await,
                Held => kill_process(program, Signal::KILL).unwrap(),
                Parent => {
                    kill_process(holder.pid(), Signal::KILL).unwrap();
                    holder.ended().await;
                }
            }
        }
        daemon.run().await;
        assert_eq!(
            (next.line().await.as_str(), next.ended().await),
            ("has", Some(0)),
            "{order:?}"
        );
        until_nothing_is_left(&daemon).await;
    }
}

#[tokio::test]
async fn remaining_child_processes_keep_the_device() {
    let daemon = machine().await;
    // The background process writes its number, and outlives the program.
    let mut program = Program::start(
        &daemon,
        ONE,
        &[
            "sh",
            "-c",
            "(exec </dev/zero; echo $(sh -c 'echo $PPID'); exec cat >/dev/null) & exit 7",
        ],
    );
    let left = Pid::from_raw(program.line().await.parse().unwrap()).unwrap();
    assert_eq!(daemon.claims().await.len(), 1);
    assert!(program.child.try_wait().unwrap().is_none(), "it waits");
    kill_process(left, Signal::KILL).unwrap();
    assert_eq!(program.ended().await, Some(7));
    until_nothing_is_left(&daemon).await;
}

#[tokio::test]
async fn container_keeps_device_without_its_tool() {
    let Some(podman) = or_skip("a container of run-with", Podman::find()) else {
        return;
    };
    let options = Options::default()
        .flag("--local-api")
        .arg("--cdi-dir", CDI_DIR);
    let daemon = machine_with(options).await;
    let script = "busybox env | busybox grep MOCK_GPU_0=; exec busybox tail -f /dev/null";
    let arguments = podman.arguments(&daemon, &[], script);
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let mut program = Program::start(&daemon, ONE, &arguments);
    assert!(program.line().await.starts_with("MOCK_GPU_0=GPU-"));
    let named = |name: &str| {
        children(program.pid())
            .into_iter()
            .find(|child| name_of(*child) == name)
    };
    // The monitor of the container is a child of `run-with`, since its own parent has ended.
    let (tool, monitor) = (
        named("podman").expect("its child"),
        named("conmon").expect("its child"),
    );
    kill_process(tool, Signal::KILL).unwrap();
    assert!(
        program.child.try_wait().unwrap().is_none(),
        "it waits for the container"
    );
    assert_eq!(daemon.claims().await.len(), 1);
    let [container] = children(monitor)[..] else {
        panic!("the container is a child of its monitor")
    };
    kill_process(container, Signal::KILL).unwrap();
    assert_eq!(program.ended().await, Some(128 + 9));
    until_nothing_is_left(&daemon).await;
}

fn name_of(process: Pid) -> String {
    let path = format!("/proc/{}/comm", process.as_raw_nonzero());
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[tokio::test]
async fn failed_program_leaves_nothing() {
    let daemon = machine().await;
    let select = [
        "run-with",
        "--class",
        "gpu",
        "--timeout",
        "1",
        "--select",
        "false",
        "--",
        "true",
    ];
    daemon
        .cli(&select)
        .await
        .failed_with(125, &["there are no devices", "4 not matched by selectors"]);
    let nonsense = [
        "run-with",
        "--class",
        "gpu",
        "--select",
        "device.driver > 1",
        "--",
        "true",
    ];
    daemon
        .cli(&nonsense)
        .await
        .failed_with(125, &["make a claim", "expression"]);
    let missing = ["run-with", "--class", "gpu", "--", "/no/such/program"];
    daemon
        .cli(&missing)
        .await
        .failed_with(127, &["/no/such/program"]);
    daemon
        .cli(&["run-with", "--class", "gpu", "--", "podman", "ps"])
        .await
        .failed_with(125, &["podman run"]);
    let mut waits = Program::start(&daemon, "false", &["true"]);
    let api = api(&daemon).await;
    while api.claims(None).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    kill_process(waits.pid(), Signal::TERM).unwrap();
    assert_eq!(waits.ended().await, Some(128 + 15));
    until_nothing_is_left(&daemon).await;
    let mut waits = Program::spawn(
        with_signals(&daemon, "--default-signal"),
        "false",
        &["true"],
    );
    while api.claims(None).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    kill_process(waits.pid(), Signal::INT).unwrap();
    assert_eq!(waits.ended().await, Some(128 + 2));
    until_nothing_is_left(&daemon).await;
}

/// A program that writes the signals that it gets, until SIGTERM ends it. What it has started may still have the handlers of the shell, so no other
/// signal ends that for certain.
const HEEDS: &str =
    "trap 'echo INT' INT; trap 'echo HUP' HUP; trap 'echo TERM; kill -KILL $!; exit 3' TERM
    tail -f /dev/null & echo ready; while :; do wait; done";

/// Returns the program with the signals as they are by default, or ignored, independent of those of the tests.
fn with_signals(root: &Root, how: &str) -> Command {
    let program = root.command();
    let mut command = Command::new("env");
    command
        .arg(format!("{how}=INT,HUP"))
        .arg(program.as_std().get_program());
    let variables = program
        .as_std()
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command
        .envs(variables)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    // No terminal has it in its foreground.
    command.process_group(0);
    command
}

#[tokio::test]
async fn signals_are_forwarded_unless_ignored() {
    let daemon = machine().await;
    let heeds = ["sh", "-c", HEEDS];
    let mut program = Program::spawn(with_signals(&daemon, "--default-signal"), ONE, &heeds);
    assert_eq!(program.line().await, "ready");
    for (signal, line) in [
        (Signal::INT, "INT"),
        (Signal::HUP, "HUP"),
        (Signal::TERM, "TERM"),
    ] {
        kill_process(program.pid(), signal).unwrap();
        assert_eq!(program.line().await, line);
    }
    assert_eq!(program.ended().await, Some(3));
    until_nothing_is_left(&daemon).await;
    // As under nohup. A shell cannot heed them either.
    let mut program = Program::spawn(with_signals(&daemon, "--ignore-signal"), ONE, &heeds);
    assert_eq!(program.line().await, "ready");
    for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
        kill_process(program.pid(), signal).unwrap();
    }
    assert_eq!(
        (program.line().await.as_str(), program.ended().await),
        ("TERM", Some(3))
    );
    until_nothing_is_left(&daemon).await;
}

/// Ctrl-C ended programs that would have gone on, such as a shell or a debugger: they got SIGTERM as well.
#[tokio::test]
async fn terminal_interrupt_is_delivered_once() {
    let daemon = machine().await;
    let nodedock = daemon.command();
    // `script` has a terminal for its command, and passes on what is written to it. A shell that starts the tests in the background ignores the
    // signal, which could not be trapped then.
    let mut script = Command::new("env");
    script.args(["--default-signal=INT", "script"]);
    let run =
        format!("exec \"$NODEDOCK\" run-with --class gpu --select '{ONE}' -- sh -c \"$HEEDS\"");
    script.args(["--quiet", "--return", "--command", &run, "/dev/null"]);
    let variables = nodedock
        .as_std()
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    script
        .envs(variables)
        .env("NODEDOCK", nodedock.as_std().get_program())
        .env("HEEDS", HEEDS);
    let mut child = script
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("util-linux");
    let mut keys = child.stdin.take().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut program = Program { child, lines };
    // The terminal shows keys as well.
    assert_eq!(program.line().await.trim(), "ready");
    for _ in 0..2 {
        keys.write_all(b"\x03").await.unwrap();
        assert_eq!(program.line().await.trim().trim_start_matches("^C"), "INT");
    }
    let [run_with] = children(program.pid())[..] else {
        panic!("one child is expected")
    };
    kill_process(run_with, Signal::TERM).unwrap();
    assert_eq!(
        (program.line().await.trim(), program.ended().await),
        ("TERM", Some(3))
    );
    until_nothing_is_left(&daemon).await;
}

#[tokio::test]
async fn claim_of_a_file_has_its_name() {
    let daemon = machine().await;
    let file = daemon.write("mine.yaml", super::claim("mine", "{deviceClassName: gpu}"));
    let file = file.to_str().unwrap();
    let show = [
        "sh",
        "-c",
        "env | grep ^MOCK_GPU_.=; echo $NODEDOCK_CDI_DEVICES",
    ];
    let named = [&["run-with", "-f", file, "--"][..], &show].concat();
    let shown = daemon.cli(&named).await.done();
    assert!(
        shown.starts_with("MOCK_GPU_") && shown.contains("claim=default_mine"),
        "{shown}"
    );
    let both = [
        "run-with",
        "--class",
        "gpu=2",
        "--class",
        "gpu",
        "--name",
        "three",
        "--",
        "sh",
        "-c",
        "env | grep -c ^MOCK_GPU_.=",
    ];
    assert_eq!(daemon.cli(&both).await.done(), "3\n");
    super::create(&daemon, "taken", "{deviceClassName: gpu}").await;
    let taken = [
        "run-with", "--class", "gpu", "--name", "taken", "--", "true",
    ];
    let refused = daemon.cli(&taken).await;
    refused.failed_with(125, &["there is a claim default/taken already"]);
    let class = daemon.path().join("class.yaml");
    let wrong = ["run-with", "-f", class.to_str().unwrap(), "--", "true"];
    daemon
        .cli(&wrong)
        .await
        .failed_with(125, &["is not one ResourceClaim"]);
}

#[tokio::test]
async fn failures_have_codes_of_container_tools() {
    let daemon = machine().await;
    let file = daemon.write("not-executable", "");
    let run = async |class: &str, program: &str| {
        let args = ["run-with", "--class", class, "--", program];
        daemon.cli(&args).await
    };
    run("gpu", "/no/such/program")
        .await
        .failed_with(127, &["/no/such/program"]);
    run("gpu", file.to_str().unwrap())
        .await
        .failed_with(126, &["ermission denied"]);
    run("none", "true")
        .await
        .failed_with(125, &["there are no devices", "none"]);
    run("gpu=5", "true")
        .await
        .failed_with(125, &["needs 5 devices"]);
    run("gpu", "docker").await.failed_with(125, &["docker run"]);
    let args = [
        "run-with",
        "--class",
        "none",
        "--wait-for-missing",
        "--timeout",
        "6",
        "--",
        "true",
    ];
    daemon
        .cli(&args)
        .await
        .failed_with(125, &["waits for devices", "there are no devices"]);
    daemon.until_no_claims().await;
}
