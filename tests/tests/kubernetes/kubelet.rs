//! The managers of a kubelet as a process, which can be killed and started again on its directory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::PATIENCE;

/// The longest pause before a command is repeated. A kubelet waits for a minute or more.
const RETRY: Duration = Duration::from_millis(100);

/// The process that runs on a kubelet's directory, and those before it.
pub(crate) struct Kubelet {
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    process: Mutex<Option<Process>>,
    seen: watch::Sender<ProcessOutput>,
    asked: AtomicU64,
}

struct Process {
    child: Child,
    commands: mpsc::UnboundedSender<String>,
}

/// Events that the current or last process has printed.
#[derive(Default)]
struct ProcessOutput {
    /// Counts the processes.
    run: u64,
    ended: bool,
    events: Vec<Value>,
    answers: HashMap<u64, Value>,
}

/// Result of a command.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) result: Value,
    /// The manager's time.
    pub(crate) elapsed: Duration,
}

/// Result of a command that was repeated until it succeeded.
#[derive(Debug)]
pub(crate) struct Repeated {
    pub(crate) result: Value,
    /// The errors of the manager before it.
    pub(crate) refusals: Vec<String>,
    /// Time of the first of these errors; without any, time of the success.
    pub(crate) decided: Instant,
    /// The manager's time for the attempt that succeeded.
    pub(crate) elapsed: Duration,
    /// Time from the first attempt to the success.
    pub(crate) waited: Duration,
}

/// Why there is no result.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The kubelet ended before it answered.
    Ended,
    /// The manager's error.
    Refused(String),
}

impl Kubelet {
    /// Starts it on the kubelet's directory, with the rights of a kubeconfig.
    pub(crate) async fn start(
        program: &Path,
        root: &Path,
        kubeconfig: &Path,
        node: &str,
        log: PathBuf,
    ) -> Self {
        let text = |path: &Path| path.to_str().expect("paths of tests are text").to_owned();
        let args = [
            "--root",
            &text(root),
            "--kubeconfig",
            &text(kubeconfig),
            "--node",
            node,
            "-v=3",
        ];
        let kubelet = Self {
            program: program.to_owned(),
            args: args.map(str::to_owned).into(),
            log,
            process: Mutex::default(),
            seen: watch::Sender::default(),
            asked: AtomicU64::new(0),
        };
        kubelet.run().await;
        kubelet
    }

    /// Kills the process and starts another one.
    pub(crate) async fn restart(&self) {
        self.stop().await;
        self.run().await;
    }

    /// Kills the process.
    pub(crate) async fn stop(&self) {
        let process = self
            .process
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.seen.send_modify(|seen| seen.ended = true);
        process
            .expect("the kubelet runs")
            .child
            .kill()
            .await
            .expect("a child may be killed");
    }

    /// Starts a process on the directories that the last one left.
    pub(crate) async fn run(&self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log);
        let mut command = Command::new(&self.program);
        command
            .arg("kubelet")
            .args(&self.args)
            .stderr(log.expect("the log is below the root"));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().expect("start the kubelet");
        let run = self.seen.borrow().run + 1;
        self.seen.send_replace(ProcessOutput {
            run,
            ..ProcessOutput::default()
        });
        let commands = write(child.stdin.take().expect("it is piped"));
        self.read(child.stdout.take().expect("it is piped"), run);
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Process { child, commands });
        self.event("it has started", |event| event["event"] == "started")
            .await;
    }

    fn read(&self, output: ChildStdout, run: u64) {
        let seen = self.seen.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let event: Value = serde_json::from_str(&line).expect("an event is JSON");
                seen.send_if_modified(|seen| seen.run == run && seen.add(event));
            }
            seen.send_if_modified(|seen| {
                seen.ended |= seen.run == run;
                seen.run == run
            });
        });
    }

    async fn wait<T>(&self, what: &str, look: impl Fn(&ProcessOutput) -> Option<T>) -> T {
        let mut seen = self.seen.subscribe();
        let found = timeout(PATIENCE, async {
            loop {
                if let Some(found) = look(&seen.borrow_and_update()) {
                    return found;
                }
                seen.changed().await.expect("the kubelet has the sender");
            }
        });
        let found = found.await;
        found.unwrap_or_else(|_| {
            let events = &self.seen.borrow().events;
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            panic!("waited in vain until {what}; the kubelet said {events:#?}\n{log}")
        })
    }

    /// The last event of the process that is wanted.
    pub(crate) async fn event(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.wait(what, |seen| {
            seen.events
                .iter()
                .rev()
                .find(|event| wanted(event))
                .cloned()
        })
        .await
    }

    /// Waits until the last that happened to a plugin is that it was registered.
    pub(crate) async fn registered(&self, plugin: &str) -> Value {
        self.last_of(plugin, "registered").await
    }

    /// Waits until the last that happened to a plugin is that it was deregistered.
    pub(crate) async fn deregistered(&self, plugin: &str) {
        self.last_of(plugin, "deregistered").await;
    }

    async fn last_of(&self, plugin: &str, wanted: &str) -> Value {
        let last = |seen: &ProcessOutput| {
            let event = seen
                .events
                .iter()
                .rev()
                .find(|event| event["name"] == plugin)?;
            (event["event"] == wanted).then(|| event.clone())
        };
        self.wait(&format!("{plugin} is {wanted}"), last).await
    }

    /// Waits until the running process has registered a plugin, regardless of later events.
    pub(crate) async fn was_registered(&self, plugin: &str) {
        let is_one = |event: &Value| event["event"] == "registered" && event["name"] == plugin;
        let look =
            |seen: &ProcessOutput| (!seen.ended && seen.events.iter().any(is_one)).then_some(());
        self.wait(&format!("{plugin} was registered"), look).await;
    }

    /// Waits until the node's status has so many devices of a resource that may be allocated.
    pub(crate) async fn allocatable(&self, resource: &str, count: usize) {
        let wanted = count.to_string();
        let last = |seen: &ProcessOutput| {
            let event = seen
                .events
                .iter()
                .rev()
                .find(|event| event["event"] == "capacity")?;
            (event["allocatable"][resource] == wanted.as_str()).then_some(())
        };
        self.wait(&format!("{count} of {resource} are allocatable"), last)
            .await;
    }

    /// Returns what `look` finds, which is called again when a device has another health.
    pub(crate) async fn until_health<T>(&self, look: impl AsyncFn() -> Option<T>) -> T {
        let changes = |seen: &ProcessOutput| {
            seen.events
                .iter()
                .filter(|event| event["event"] == "health")
                .count()
        };
        loop {
            let before = changes(&self.seen.borrow());
            if let Some(found) = look().await {
                return found;
            }
            self.wait("a device has another health", |seen| {
                (changes(seen) > before).then_some(())
            })
            .await;
        }
    }

    /// Calls a manager for a pod repeatedly, as a kubelet does, until the call succeeds. A restarted kubelet continues when it has
    /// registered the plugin.
    pub(crate) async fn repeat(
        &self,
        what: &str,
        namespace: &str,
        pod: &str,
        plugin: &str,
    ) -> Repeated {
        self.bound(namespace, pod, plugin).await;
        let (began, mut refusals, mut first) = (Instant::now(), Vec::new(), None);
        loop {
            match self.ask(what, namespace, pod, "main").await {
                Ok(done) => {
                    let decided = first.unwrap_or_else(Instant::now);
                    let (result, elapsed, waited) = (done.result, done.elapsed, began.elapsed());
                    return Repeated {
                        result,
                        refusals,
                        decided,
                        elapsed,
                        waited,
                    };
                }
                Err(Failure::Ended) => self.was_registered(plugin).await,
                Err(Failure::Refused(why)) => {
                    assert!(
                        began.elapsed() < PATIENCE,
                        "{what} {pod}: {why}, after {refusals:#?}"
                    );
                    first.get_or_insert_with(Instant::now);
                    refusals.push(why);
                    self.pause().await;
                }
            }
        }
    }

    /// Waits until a pod is bound to the node.
    pub(crate) async fn bound(&self, namespace: &str, pod: &str, plugin: &str) {
        while let Err(why) = self.ask("bound", namespace, pod, "").await {
            match why {
                Failure::Ended => self.was_registered(plugin).await,
                Failure::Refused(why) => panic!("{why}"),
            }
        }
    }

    /// Waits until something happens to a plugin, or for a little time.
    async fn pause(&self) {
        let mut seen = self.seen.subscribe();
        let before = seen.borrow_and_update().events.len();
        let _ = timeout(RETRY, seen.wait_for(|seen| seen.events.len() != before)).await;
    }

    /// Has a manager do something for a pod, as soon as that is bound to the node.
    pub(crate) async fn ask(
        &self,
        what: &str,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Result<Done, Failure> {
        let id = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let line = json!({"id": id, "do": what, "namespace": namespace, "pod": pod, "container": container});
        let run = {
            let process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(process) = &*process else {
                return Err(Failure::Ended);
            };
            // A process that has ended is found below.
            let _ = process.commands.send(format!("{line}\n"));
            self.seen.borrow().run
        };
        let mut answer = self
            .wait(&format!("{line} is answered"), |seen| {
                match seen.answers.get(&id) {
                    Some(answer) => Some(Some(answer.clone())),
                    None => (seen.run != run || seen.ended).then_some(None),
                }
            })
            .await
            .ok_or(Failure::Ended)?;
        match answer["error"].as_str() {
            Some(error) => Err(Failure::Refused(error.to_owned())),
            None => Ok(Done {
                result: answer["result"].take(),
                elapsed: Duration::from_micros(answer["us"].as_u64().unwrap_or_default()),
            }),
        }
    }
}

impl ProcessOutput {
    fn add(&mut self, event: Value) -> bool {
        match event["id"].as_u64() {
            Some(id) => drop(self.answers.insert(id, event)),
            None => self.events.push(event),
        }
        true
    }
}

/// A task that writes lines, until the process or this is gone.
fn write(mut input: ChildStdin) -> mpsc::UnboundedSender<String> {
    let (sender, mut lines) = mpsc::unbounded_channel::<String>();
    tokio::spawn(async move {
        while let Some(line) = lines.recv().await {
            if input.write_all(line.as_bytes()).await.is_err() {
                return;
            }
        }
    });
    sender
}
