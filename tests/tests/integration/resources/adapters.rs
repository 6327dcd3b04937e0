//! A device plugin that an adapter makes a DRA driver, without Kubernetes: claims and limits of pods, each party's restart, and what goes wrong.

use std::path::PathBuf;

use native_device_plugin::{Device, Plugin, Register, Script, ScriptedOutcome, api};
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::{Daemon, Options, assert_parts};

use super::{
    NIC, calling, ids, limited, nics, ready, short, until_allocate, with_nics,
    with_registration_socket,
};

const DRIVER: &str = "nic.example.com";
const ADAPTER: &str = "resource: example.com/nic\ndriver: nic.example.com\npool: nics\n";
const HEADER: &str = "apiVersion: nodedock.dev/v1\nkind: DevicePluginAdapter\n";

fn adapter_path(daemon: &Daemon) -> PathBuf {
    daemon.state().join("device-plugins/nic.adapter.yaml")
}

fn write_adapter(daemon: &Daemon, text: &str) {
    std::fs::write(adapter_path(daemon), format!("{HEADER}{text}")).expect("it is written");
}

/// A daemon that has read an adapter beside the plugins' sockets.
async fn adapted() -> Daemon {
    let mut daemon = Daemon::start().await;
    write_adapter(&daemon, ADAPTER);
    daemon.restart().await;
    daemon
}

/// A pod with a claim for devices.
fn claiming(name: &str, devices: &[&str]) -> v1::PreparePodRequest {
    let devices: Vec<_> = devices
        .iter()
        .map(|device| format!("{DRIVER}/nics/{device}"))
        .collect();
    let devices: Vec<_> = devices.iter().map(String::as_str).collect();
    request(&pod(name), &[&claim(&format!("claim-of-{name}"), &devices)])
}

/// A daemon that starts removes the sockets of plugins beside its own.
async fn register_again(plugin: &Plugin) {
    plugin.serve().expect("its socket is made");
    plugin.register().await.expect("it registers");
}

async fn adapter(daemon: &Daemon) -> v1::Adapter {
    let answer = daemon
        .client()
        .list_adapters(v1::ListAdaptersRequest {})
        .await
        .expect("it answers");
    answer.into_inner().adapters.remove(0)
}

/// Names and health of the driver's devices.
async fn devices(daemon: &Daemon) -> Vec<(String, String)> {
    let devices = daemon
        .devices()
        .await
        .into_iter()
        .filter(|device| device.driver == DRIVER);
    devices.map(|device| (device.name, device.health)).collect()
}

async fn until_devices(daemon: &Daemon, wanted: &[(&str, &str)]) {
    let wanted: Vec<_> = wanted
        .iter()
        .map(|(name, health)| ((*name).to_owned(), (*health).to_owned()))
        .collect();
    let end = tokio::time::Instant::now() + nodedock_tests::DEADLINE;
    while devices(daemon).await != wanted {
        assert!(
            tokio::time::Instant::now() < end,
            "{:?}, not {wanted:?}",
            devices(daemon).await
        );
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn claims_and_limits_share_plugin_devices() {
    let mut daemon = adapted().await;
    let plugin = with_nics(&daemon, Script::ok(), 3).await;
    let serves = |driver: &v1::Driver| driver.state == "serving" && driver.devices == 3;
    let driver = daemon.until_driver(DRIVER, serves).await;
    assert_eq!(driver.kind, "adapter");

    let first = daemon.prepared(claiming("claimed", &["nic-1"])).await;
    assert_eq!(until_allocate(&plugin).await, ["nic-1"]);
    let file = daemon.only_cdi_file();
    assert!(
        file.env().iter().any(|line| line.ends_with("=nic-1")),
        "{:?}",
        file.env()
    );
    // The other two go to a pod by its limits, and there is no third.
    let limits = ready(&daemon, limited("limited", &[(NIC, 2)])).await;
    assert_eq!(ids(&limits, "main", NIC), ["nics/nic-0", "nics/nic-2"]);
    assert_eq!(
        short(&daemon, limited("late", &[(NIC, 1)])).await.code,
        "too-few-devices"
    );
    let held = daemon.refused(claiming("twice", &["nic-1"])).await;
    assert_eq!(held.code, "device-held");

    // A repeated prepare is answered without the plugin, also after a crash, and so is an unprepare.
    plugin.die();
    assert_eq!(
        daemon
            .prepared(claiming("claimed", &["nic-1"]))
            .await
            .containers,
        first.containers
    );
    daemon.crash().await;
    assert_eq!(
        daemon
            .prepared(claiming("claimed", &["nic-1"]))
            .await
            .containers,
        first.containers
    );
    daemon.unprepare(&pod("claimed")).await;
    let plugin = with_nics(&daemon, Script::ok(), 3).await;
    assert_eq!(
        ids(
            &ready(&daemon, limited("late", &[(NIC, 1)])).await,
            "main",
            NIC
        ),
        ["nics/nic-1"]
    );
    assert_eq!(until_allocate(&plugin).await, ["nic-1"]);
    for name in ["limited", "late"] {
        daemon.unprepare(&pod(name)).await;
    }
    daemon.assert_empty().await;
}

#[tokio::test]
async fn devices_follow_the_plugin_list() {
    let daemon = adapted().await;
    let options = with_registration_socket(&daemon, NIC);
    let registry = match &options.register {
        Register::PluginsRegistry(registry) => registry.clone(),
        other => panic!("{other:?}"),
    };
    let plugin = Plugin::start(options.clone(), Script::ok(), nics(2))
        .await
        .expect("it registers");
    until_devices(&daemon, &[("nic-0", "healthy"), ("nic-1", "healthy")]).await;
    plugin.list(vec![Device::healthy("nic-0"), Device::unhealthy("nic-1")]);
    until_devices(&daemon, &[("nic-0", "healthy"), ("nic-1", "unhealthy")]).await;
    plugin.list(nics(1));
    until_devices(&daemon, &[("nic-0", "healthy")]).await;
    let lost = daemon.refused(claiming("lost", &["nic-1"])).await;
    assert_parts(&lost.message, &["nic-1", "pool nics", DRIVER]);
    plugin.disconnect();
    until_devices(&daemon, &[("nic-0", "unhealthy")]).await;
    assert!(registry.is_dir() && !adapter(&daemon).await.connected);
}

#[tokio::test]
async fn allocated_plugin_devices_stay_until_end() {
    let mut daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 3).await;
    let before = ready(&daemon, limited("old", &[(NIC, 2)])).await;
    assert_eq!(ids(&before, "main", NIC), ["nic-0", "nic-1"]);
    write_adapter(&daemon, ADAPTER);
    daemon.restart().await;
    register_again(&plugin).await;
    until_devices(&daemon, &[("nic-2", "healthy")]).await;
    assert_eq!(adapter(&daemon).await.held, ["nic-0", "nic-1"]);
    let explained = daemon.cli(&["explain", "resource", NIC]).await.done();
    assert_parts(
        &explained,
        &[
            "driver nic.example.com",
            "from the time before the adapter: nic-0, nic-1",
        ],
    );
    let problem = daemon.refused(claiming("new", &["nic-0"])).await;
    assert_eq!(problem.code, "no-such-device", "{problem:?}");
    // The pod keeps what it has, and gets it again.
    assert_eq!(
        ready(&daemon, limited("old", &[(NIC, 2)])).await.containers,
        before.containers
    );
    daemon.unprepare(&pod("old")).await;
    until_devices(
        &daemon,
        &[
            ("nic-0", "healthy"),
            ("nic-1", "healthy"),
            ("nic-2", "healthy"),
        ],
    )
    .await;
    daemon.prepared(claiming("new", &["nic-0"])).await;

    // And back: without its file the adapter is a plugin again once its claims are unprepared.
    std::fs::remove_file(adapter_path(&daemon)).expect("it is there");
    daemon.restart().await;
    register_again(&plugin).await;
    until_devices(
        &daemon,
        &[
            ("nic-0", "healthy"),
            ("nic-1", "healthy"),
            ("nic-2", "healthy"),
        ],
    )
    .await;
    assert!(adapter(&daemon).await.removed);
    daemon.unprepare(&pod("new")).await;
    daemon.restart().await;
    register_again(&plugin).await;
    daemon.until_allocatable(NIC, 3).await;
    assert_eq!(
        ids(
            &ready(&daemon, limited("again", &[(NIC, 1)])).await,
            "main",
            NIC
        ),
        ["nic-0"]
    );
    assert!(
        daemon
            .devices()
            .await
            .iter()
            .all(|device| device.driver != DRIVER)
    );
}

/// A file that was written or deleted had no effect before a restart.
#[tokio::test]
async fn adapter_files_take_effect_at_once() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 3).await;
    let before = ready(&daemon, limited("old", &[(NIC, 1)])).await;
    assert_eq!(ids(&before, "main", NIC), ["nic-0"]);
    write_adapter(&daemon, ADAPTER);
    until_devices(&daemon, &[("nic-1", "healthy"), ("nic-2", "healthy")]).await;
    assert_eq!(adapter(&daemon).await.held, ["nic-0"]);
    daemon.until_allocatable(NIC, 2).await;
    daemon.prepared(claiming("new", &["nic-1"])).await;
    let limits = ready(&daemon, limited("limited", &[(NIC, 1)])).await;
    assert_eq!(ids(&limits, "main", NIC), ["nics/nic-2"]);
    // The pod from before keeps what it has.
    let again = ready(&daemon, limited("old", &[(NIC, 1)])).await;
    assert_eq!(again.containers, before.containers);
    for name in ["old", "limited"] {
        daemon.unprepare(&pod(name)).await;
    }
    let healthy = ["nic-0", "nic-1", "nic-2", "nic-3"].map(|name| (name, "healthy"));
    until_devices(&daemon, &healthy[..3]).await;
    // Its registration is the one from before.
    plugin.list(nics(4));
    until_devices(&daemon, &healthy).await;

    std::fs::remove_file(adapter_path(&daemon)).expect("it is there");
    until_adapter(&daemon, |of| of.removed && !of.enabled).await;
    assert_eq!(daemon.only_claim().await.state, "prepared");
    write_adapter(&daemon, ADAPTER);
    until_adapter(&daemon, |of| !of.removed && of.enabled).await;
    daemon.unprepare(&pod("new")).await;
    daemon.assert_empty().await;

    // What only a start changes.
    write_adapter(&daemon, &ADAPTER.replace("pool: nics", "pool: others"));
    daemon.until_conditions(&["config-needs-restart"]).await;
    write_adapter(&daemon, ADAPTER);
    daemon.until_conditions(&[]).await;
}

async fn until_adapter(daemon: &Daemon, is_wanted: impl Fn(&v1::Adapter) -> bool) {
    let wait = async {
        while !is_wanted(&adapter(daemon).await) {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(nodedock_tests::DEADLINE, wait).await;
    assert!(waited.is_ok(), "{:?}", adapter(daemon).await);
}

#[tokio::test]
async fn invalid_plugin_answer_leaves_nothing() {
    let mut daemon = Daemon::start().await;
    write_adapter(&daemon, &format!("{ADAPTER}paths: [/dev/null]\n"));
    daemon.restart().await;
    let node = |path: &str| {
        ScriptedOutcome::container(api::ContainerAllocateResponse {
            devices: vec![api::DeviceSpec {
                container_path: "/dev/nic".to_owned(),
                host_path: path.to_owned(),
                permissions: "rw".to_owned(),
            }],
            ..Default::default()
        })
    };
    let plugin = with_nics(&daemon, Script::ok(), 1).await;
    for (answer, code) in [
        (ScriptedOutcome::NoResponse, "driver-answer-not-valid"),
        (node("/dev/zero"), "allocation-path-denied"),
        (node("/dev/../dev/null"), "driver-answer-not-valid"),
        (node("/dev/no-such-nic"), "allocation-path-missing"),
    ] {
        plugin.set_script(Script::always(answer));
        let problem = daemon.refused(claiming("bad", &["nic-0"])).await;
        assert!(problem.message.contains(NIC), "{problem:?}");
        assert_eq!(problem.code, code, "{problem:?}");
        daemon.unprepare(&pod("bad")).await;
    }
    plugin.set_script(Script::always(node("/dev/null")));
    daemon.prepared(claiming("good", &["nic-0"])).await;
    daemon.unprepare(&pod("good")).await;
    daemon.assert_empty().await;
}

#[tokio::test]
async fn bad_adapters_are_reported_as_conditions() {
    let mut daemon = Daemon::start_with(Options::default().config(&format!(
        "devicePluginAdapters: [{{ {} }}]\n",
        ADAPTER.trim().replace('\n', ", ")
    )))
    .await;
    write_adapter(&daemon, ADAPTER);
    let bad = daemon.state().join("plugins_registry/bad.adapter.yaml");
    std::fs::write(&bad, format!("{HEADER}{ADAPTER}driverz: x\n")).expect("it is written");
    daemon.restart().await;
    let conditions = daemon
        .until_conditions(&["adapter-conflict", "adapter-invalid"])
        .await;
    let text: Vec<_> = conditions
        .iter()
        .filter_map(|of| Some(of.problem.as_ref()?.message.clone()))
        .collect();
    assert_parts(
        &text.join("\n"),
        &[
            "the config",
            "nic.adapter.yaml",
            "bad.adapter.yaml",
            "line 6",
            "driverz",
        ],
    );

    let shown = daemon.cli(&["get", "adapters"]).await.done();
    assert_parts(
        &shown,
        &[
            "nic.example.com",
            "example.com/nic",
            "enabled",
            "gone",
            "no device plugin has registered",
        ],
    );
    let disabled = daemon.cli(&["adapter", "disable", DRIVER]).await.done();
    assert_parts(
        &disabled,
        &["adapter nic.example.com of example.com/nic is disabled"],
    );
    daemon.crash().await;
    assert!(!adapter(&daemon).await.enabled);
    daemon.cli(&["adapter", "enable", DRIVER]).await.done();
    assert!(adapter(&daemon).await.enabled);
    let unknown = daemon
        .cli(&["adapter", "enable", "other.example.com"])
        .await;
    assert_parts(
        &unknown.failed(1),
        &["no adapter of the driver \"other.example.com\""],
    );
    let reload = daemon.cli(&["driver", "reload", DRIVER]).await;
    assert_parts(
        &reload.failed(1),
        &["reads the adapter whenever its file changes"],
    );
    // Beside another plugin's name.
    let other = Plugin::start(calling(&daemon, "example.com/other"), Script::ok(), nics(1)).await;
    let _other = other.expect("it is a device plugin as before");
    daemon.until_allocatable("example.com/other", 1).await;
}
