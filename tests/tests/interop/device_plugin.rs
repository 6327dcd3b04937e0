//! A device plugin in Go on the official API, which registers with the real daemon and watches for its socket.

use std::path::Path;
use std::process::Stdio;

use nodedock_tests::{DEADLINE, Daemon, Root, machine};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::programs;

/// A running plugin. It is killed when dropped.
struct Plugin {
    _process: Child,
    events: Lines<BufReader<ChildStdout>>,
}

impl Plugin {
    fn start(root: &Root, program: &Path, options: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.arg("--device-plugins-dir").arg(root.state().join("device-plugins")).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("start the plugin");
        let stdout = process.stdout.take().expect("it is piped");
        Self { _process: process, events: BufReader::new(stdout).lines() }
    }

    /// The next event.
    async fn event(&mut self) -> Value {
        let line = timeout(DEADLINE, self.events.next_line()).await.expect("the plugin says nothing");
        let line = line.expect("read the plugin's output").expect("the plugin ended");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Waits until it is registered and was asked for its devices, which come in any order.
    async fn registered_and_listed(&mut self) {
        let mut events = [self.event().await["event"].take(), self.event().await["event"].take()];
        events.sort_by_key(|event| event.to_string());
        assert_eq!(events, ["listed", "registered"]);
    }
}

#[tokio::test]
async fn a_plugin_that_dials_the_path_registers_and_lists_and_is_back_after_a_crash_of_the_daemon() {
    let program = match programs::go("device-plugin") {
        Ok(program) => program,
        Err(why) => return machine::skip("a device plugin in Go", &why),
    };
    let mut daemon = Daemon::start().await;
    let options = ["--resource", "go.example.com/device", "--devices", "device-0,device-1,device-2"];
    let mut plugin = Plugin::start(&daemon, &program, &options);
    plugin.registered_and_listed().await;
    let listed = "device plugin listed its devices resource=go.example.com/device devices=3";
    daemon.until_log(listed).await;

    daemon.crash().await;
    plugin.registered_and_listed().await;
    daemon.restart().await;
    plugin.registered_and_listed().await;
}

#[tokio::test]
async fn a_plugin_for_what_is_no_extended_resource_is_told_the_rule() {
    let program = match programs::go("device-plugin") {
        Ok(program) => program,
        Err(why) => return machine::skip("a device plugin in Go that is refused", &why),
    };
    let daemon = Daemon::start().await;
    let mut plugin = Plugin::start(&daemon, &program, &["--resource", "kubernetes.io/device"]);
    let event = plugin.event().await;
    assert_eq!(event["event"], "refused");
    let why = event["why"].as_str().expect("a text");
    assert!(why.contains("the ResourceName is invalid") && why.contains("outside kubernetes.io"), "{why}");
}
