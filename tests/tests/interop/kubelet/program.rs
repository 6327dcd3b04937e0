//! The kubelet in Go as a process: commands go in, what happens comes out.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use nodedock_tests::DEADLINE;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::programs;

/// The program, or nothing and a line that says what is left out.
pub(crate) fn build() -> Option<PathBuf> {
    let built = programs::go("kubelet");
    built.inspect_err(|why| nodedock_tests::machine::skip("a kubelet by the official types in Go", why)).ok()
}

/// A running kubelet. It is killed when dropped.
pub(crate) struct GoKubelet {
    _process: Child,
    commands: ChildStdin,
    events: Lines<BufReader<ChildStdout>>,
    /// Events that were read while another was waited for.
    passed: Vec<Value>,
    asked: u64,
}

impl GoKubelet {
    /// Starts it on the kubelet's directories below `root`.
    pub(crate) async fn start(program: &Path, root: &Path) -> Self {
        let mut command = Command::new(program);
        command.arg("--root").arg(root).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("start the kubelet");
        let commands = process.stdin.take().expect("it is piped");
        let events = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        let mut kubelet = Self { _process: process, commands, events, passed: Vec::new(), asked: 0 };
        kubelet.event("it starts", |event| event["event"] == "started").await;
        kubelet
    }

    /// The first event that is wanted, of those that no caller took yet.
    pub(crate) async fn event(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(at) = self.passed.iter().position(&wanted) {
            return self.passed.remove(at);
        }
        let found = timeout(DEADLINE, async {
            while let Some(line) = self.events.next_line().await.expect("read the kubelet's output") {
                let event: Value = serde_json::from_str(&line).expect("JSON");
                if wanted(&event) {
                    return event;
                }
                self.passed.push(event);
            }
            panic!("the kubelet ended before {what}");
        });
        let found = found.await;
        found.unwrap_or_else(|_| panic!("waited in vain until {what}; the kubelet saw {:#?}", self.passed))
    }

    /// Forgets what was seen so far.
    pub(crate) fn forget(&mut self) {
        self.passed.clear();
    }

    /// Carries a command out: what came of it, or the error.
    pub(crate) async fn ask(&mut self, mut command: Value) -> Result<Value, String> {
        self.asked += 1;
        let id = self.asked;
        command["id"] = json!(id);
        self.commands.write_all(format!("{command}\n").as_bytes()).await.expect("the kubelet reads");
        let what = format!("it answers {command}");
        let mut answer = self.event(&what, |event| event["event"] == "answer" && event["id"] == id).await;
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer["result"].take()),
        }
    }

    pub(crate) async fn registered(&mut self, driver: &str) -> Value {
        let what = format!("{driver} is registered");
        self.event(&what, |event| event["event"] == "registered" && event["driver"] == driver).await
    }
}
