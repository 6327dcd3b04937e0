//! Plugins that answer wrongly, late or not at all: the pod is refused with the reason, loses nothing, and gets its devices later.

use native_device_plugin::{Plugin, Script, ScriptedOutcome, api};
use nodedock_tests::{Daemon, Options, assert_parts};
use tonic::Code;

use super::agreement::agree;
use super::{NIC, calling, freed, limited, nics, ready, short, start, started, with_nics};

const SHORT_DEADLINE: &str = "claims: {callDeadlineMs: 3000}\n";

/// Starts a daemon with a deadline for calls that a test can wait for.
async fn daemon() -> Daemon {
    Daemon::start_with(Options::default().config(SHORT_DEADLINE)).await
}

fn mounting(host_path: &str) -> ScriptedOutcome {
    let mount = api::Mount {
        container_path: "/x".to_owned(),
        host_path: host_path.to_owned(),
        read_only: true,
    };
    ScriptedOutcome::container(api::ContainerAllocateResponse {
        mounts: vec![mount],
        ..Default::default()
    })
}

fn with_node(host_path: &str, permissions: &str) -> ScriptedOutcome {
    let node = api::DeviceSpec {
        container_path: "/dev/x".to_owned(),
        host_path: host_path.to_owned(),
        permissions: permissions.to_owned(),
    };
    ScriptedOutcome::container(api::ContainerAllocateResponse {
        devices: vec![node],
        ..Default::default()
    })
}

fn naming(name: &str) -> ScriptedOutcome {
    let cdi_devices = vec![api::CdiDevice {
        name: name.to_owned(),
    }];
    ScriptedOutcome::container(api::ContainerAllocateResponse {
        cdi_devices,
        ..Default::default()
    })
}

#[tokio::test]
async fn refused_answer_frees_the_devices() {
    let daemon = daemon().await;
    let plugin = with_nics(&daemon, Script::ok(), 2).await;
    let refusal = |code| ScriptedOutcome::Status(code, "out of order".to_owned());
    let cases = [
        (
            ScriptedOutcome::NoResponse,
            "driver-answer-not-valid",
            "no container response",
        ),
        (
            mounting("/none/of/this"),
            "allocation-path-missing",
            "/none/of/this",
        ),
        (
            with_node("/dev/none-of-this", "rw"),
            "allocation-path-missing",
            "/dev/none-of-this",
        ),
        (
            with_node("/dev/null", "rwx"),
            "driver-answer-not-valid",
            "rwx",
        ),
        (
            with_node("dev/null", "rw"),
            "driver-answer-not-valid",
            "absolute path",
        ),
        (
            with_node("/proc/version", "rw"),
            "allocation-node-invalid",
            "/proc/version",
        ),
        (
            with_node("/proc/sys/kernel", "rw"),
            "allocation-node-invalid",
            "no device node",
        ),
        (
            naming("nic-0"),
            "driver-answer-not-valid",
            "VENDOR/CLASS=NAME",
        ),
        (ScriptedOutcome::bad_path(), "driver-answer-not-valid", ".."),
        (refusal(Code::Unknown), "driver-refused", "out of order"),
        (refusal(Code::Internal), "driver-failed", "out of order"),
        (ScriptedOutcome::Hang, "driver-deadline", "did not answer"),
    ];
    for (answer, code, words) in cases {
        plugin.set_script(Script::always(answer));
        let problem = short(&daemon, limited("one", &[(NIC, 2)])).await;
        assert_eq!(problem.code, code, "{problem:?}");
        assert!(
            problem.message.contains(NIC) && problem.message.contains(words),
            "{problem:?}"
        );
        assert!(
            agree(&daemon).await.is_empty(),
            "{code}: no pod has anything"
        );
        plugin.set_script(Script::ok());
        ready(&daemon, limited("two", &[(NIC, 2)])).await;
        freed(&daemon, "two").await;
    }
}

#[tokio::test]
async fn plugin_refusal_prevents_container_start() {
    let daemon = daemon().await;
    let options = native_device_plugin::Options {
        pre_start: true,
        ..calling(&daemon, NIC)
    };
    let plugin = started(&daemon, options, Script::ok(), nics(1)).await;
    let answer = ready(&daemon, limited("one", &[(NIC, 1)])).await;
    plugin.set_script(Script::ok().pre_start(|_| ScriptedOutcome::refuse("not now")));
    let refused = start(&daemon, "one", "main")
        .await
        .expect_err("it may not start");
    assert_parts(refused.message(), &[NIC, "not now"]);
    plugin.set_script(Script::ok());
    assert_eq!(
        start(&daemon, "one", "main").await.expect("it may start"),
        answer.containers[0]
    );
}

#[tokio::test]
async fn restarted_plugin_is_called_again() {
    let daemon = Daemon::start().await;
    let first = with_nics(&daemon, Script::always(ScriptedOutcome::Die), 2).await;
    let problem = short(&daemon, limited("one", &[(NIC, 2)])).await;
    assert!(
        problem.kind == "unavailable" && problem.message.contains(NIC),
        "{problem:?}"
    );
    drop::<Plugin>(first);
    // Else the devices of the first one pass for those of the second.
    daemon.until_resource(NIC, |nic| nic.allocatable == 0).await;
    let _second = with_nics(&daemon, Script::ok(), 2).await;
    ready(&daemon, limited("one", &[(NIC, 2)])).await;
}
