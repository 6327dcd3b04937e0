//! The kubelet in Go as a process: commands go in, what happens comes out.

use std::path::{Path, PathBuf};

use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::programs::{self, Running};

/// The program, or nothing and a line that says what is left out.
pub(crate) fn build() -> Option<PathBuf> {
    or_skip(
        "a kubelet by the official types in Go",
        programs::go("kubelet"),
    )
}

pub(crate) struct GoKubelet {
    running: Running,
    asked: u64,
}

impl GoKubelet {
    /// Starts it on the kubelet's directories below `root`.
    pub(crate) async fn start(program: &Path, root: &Path) -> Self {
        let mut command = Command::new(program);
        command.arg("--root").arg(root);
        let mut running = Running::start(command);
        running
            .event("it starts", |event| event["event"] == "started")
            .await;
        Self { running, asked: 0 }
    }

    /// The first event that is wanted, of those that no caller took yet.
    pub(crate) async fn event(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.running.event(what, wanted).await
    }

    /// Forgets what was seen so far.
    pub(crate) fn forget(&mut self) {
        self.running.forget();
    }

    /// Carries a command out: what came of it, or the error.
    pub(crate) async fn ask(&mut self, mut command: Value) -> Result<Value, String> {
        self.asked += 1;
        let id = self.asked;
        command["id"] = json!(id);
        self.running.command(&command).await;
        let what = format!("it answers {command}");
        let mut answer = self
            .event(&what, |event| {
                event["event"] == "answer" && event["id"] == id
            })
            .await;
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer["result"].take()),
        }
    }

    pub(crate) async fn registered(&mut self, driver: &str) -> Value {
        let what = format!("{driver} is registered");
        self.event(&what, |event| {
            event["event"] == "registered" && event["driver"] == driver
        })
        .await
    }
}
