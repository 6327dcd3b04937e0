//! Tests with valid and invalid calls of plugins.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener as StdListener;
use std::time::Duration;

use native_device_plugin::{Device, Event, Options, Plugin, Script, ScriptedOutcome};
use wire::registration_client::RegistrationClient;

use super::*;
use crate::endpoints::tests::{Bench, RESOURCE};

/// A bench with a serving socket.
async fn serving() -> Bench {
    let bench = Bench::new();
    start(&bench, &bench.tasks).await;
    bench
}

async fn start(bench: &Bench, tasks: &Tasks) {
    let directory = bench.dir.path().to_owned();
    let listener = listen(&directory).await.unwrap();
    tasks.spawn(
        "registration",
        serve(listener, directory, bench.endpoints.clone(), tasks.clone()),
    );
}

fn request(endpoint: &str) -> wire::RegisterRequest {
    wire::RegisterRequest {
        version: "v1beta1".into(),
        endpoint: endpoint.into(),
        resource_name: RESOURCE.into(),
        options: None,
    }
}

async fn register(bench: &Bench, request: wire::RegisterRequest) -> Result<(), Status> {
    let channel = socket::connect(&bench.dir.path().join(SOCKET))
        .await
        .unwrap();
    RegistrationClient::new(channel)
        .register(request)
        .await
        .map(drop)
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path)
        .unwrap()
        .permissions()
        .mode()
        & 0o777
}

#[tokio::test]
async fn directory_is_private_and_swept() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("state/device-plugins");
    let first = listen(&directory).await.unwrap();
    assert_eq!(
        (mode(&directory), mode(&directory.join(SOCKET))),
        (0o700, 0o600)
    );
    drop(first);
    drop(StdListener::bind(directory.join("gpu.sock")).unwrap());
    std::fs::write(directory.join("DEPRECATION"), "").unwrap();
    std::fs::create_dir(directory.join("below")).unwrap();
    let before = std::fs::metadata(directory.join(SOCKET)).unwrap();
    let _second = listen(&directory).await.unwrap();
    let after = std::fs::metadata(directory.join(SOCKET)).unwrap();
    assert_ne!(
        (before.ino(), before.ctime_nsec()),
        (after.ino(), after.ctime_nsec())
    );
    let mut left: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["DEPRECATION", "below", SOCKET]);
}

#[tokio::test]
async fn directory_in_use_is_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let _theirs = listen(directory.path()).await.unwrap();
    let _plugin = StdListener::bind(directory.path().join("gpu.sock")).unwrap();
    assert!(matches!(
        listen(directory.path()).await,
        Err(ListenError::Bind(BindError::InUse(_)))
    ));
    assert!(directory.path().join("gpu.sock").exists());
    let file = tempfile::tempdir().unwrap();
    std::fs::write(file.path().join(SOCKET), "precious").unwrap();
    assert!(matches!(
        listen(file.path()).await,
        Err(ListenError::Bind(BindError::NotASocket(_)))
    ));
    let below_a_file = file.path().join(SOCKET).join("device-plugins");
    let error = listen(&below_a_file).await.unwrap_err();
    assert!(
        chain(&error).contains("create the directory of device plugins"),
        "{}",
        chain(&error)
    );
}

#[tokio::test]
async fn registration_waits_only_for_options() {
    let mut bench = serving().await;
    let plugin =
        Plugin::unregistered(Options::new(RESOURCE, bench.dir.path()), Script::ok()).unwrap();
    plugin.register().await.unwrap();
    assert_eq!(plugin.event().await, Event::OptionsAsked);
    let one = bench.arrived().await;
    plugin.list(vec![Device::healthy("a")]);
    bench.listed(one, &["a"]).await;
}

#[tokio::test]
async fn options_in_the_request_are_ignored() {
    let mut bench = serving().await;
    let plugin = bench.plugin(Script::ok(), &[]);
    let all = wire::DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: true,
    };
    let request = wire::RegisterRequest {
        options: Some(all),
        ..request(&plugin.options().endpoint)
    };
    register(&bench, request).await.unwrap();
    let id = bench.arrived().await;
    assert_eq!(bench.driver(id).options(), Default::default());
}

#[tokio::test]
async fn invalid_requests_name_the_rule() {
    let mut bench = serving().await;
    let plugin = bench.plugin(Script::ok(), &[]);
    let endpoint = plugin.options().endpoint.as_str();
    std::fs::write(bench.dir.path().join("file.sock"), "").unwrap();
    let outside = tempfile::tempdir().unwrap();
    let _far = StdListener::bind(outside.path().join("far.sock")).unwrap();
    symlink(
        outside.path().join("far.sock"),
        bench.dir.path().join("out.sock"),
    )
    .unwrap();
    symlink("nothing", bench.dir.path().join("dangling.sock")).unwrap();
    symlink(endpoint, bench.dir.path().join("link.sock")).unwrap();
    symlink(SOCKET, bench.dir.path().join("own.sock")).unwrap();
    std::fs::hard_link(
        bench.dir.path().join(SOCKET),
        bench.dir.path().join("second.sock"),
    )
    .unwrap();
    let absolute = bench.dir.path().join(endpoint);
    let version = |text: &str| wire::RegisterRequest {
        version: text.into(),
        ..request(endpoint)
    };
    let named = |text: &str| wire::RegisterRequest {
        resource_name: text.into(),
        ..request(endpoint)
    };
    let long = "x".repeat(10_000);
    let cases = [
        (
            version("v1"),
            Code::InvalidArgument,
            r#"version "v1" is not supported; supported version is "v1beta1""#,
        ),
        (version(""), Code::InvalidArgument, "v1beta1"),
        (
            named("cpu"),
            Code::InvalidArgument,
            r#"the ResourceName is invalid: extended resource "cpu""#,
        ),
        (named(""), Code::InvalidArgument, "domain/name is wanted"),
        (
            named("kubernetes.io/gpu"),
            Code::InvalidArgument,
            "outside kubernetes.io",
        ),
        (
            named("requests.example.com/gpu"),
            Code::InvalidArgument,
            "domain/name is wanted",
        ),
        (
            named("a/b/c"),
            Code::InvalidArgument,
            "domain/name is wanted",
        ),
        (named(&long), Code::InvalidArgument, "domain/name is wanted"),
        (
            request("../far.sock"),
            Code::InvalidArgument,
            "the name of a file",
        ),
        (
            request(absolute.to_str().unwrap()),
            Code::InvalidArgument,
            "the name of a file",
        ),
        (
            request(""),
            Code::InvalidArgument,
            "endpoint \"\": the name of a file",
        ),
        (request(".."), Code::InvalidArgument, "the name of a file"),
        (
            request("a\0b"),
            Code::InvalidArgument,
            "endpoint \"a\\0b\": the name of a file",
        ),
        (request(&long), Code::InvalidArgument, "107 bytes"),
        (
            request(SOCKET),
            Code::InvalidArgument,
            "on which plugins register",
        ),
        (
            request("file.sock"),
            Code::InvalidArgument,
            "is not a socket",
        ),
        (
            request("own.sock"),
            Code::InvalidArgument,
            "is a socket of this daemon",
        ),
        (
            request("second.sock"),
            Code::InvalidArgument,
            "is a socket of this daemon",
        ),
        (
            request("out.sock"),
            Code::InvalidArgument,
            "leads out of its directory",
        ),
        (request("none.sock"), Code::NotFound, "does not exist"),
        (request("dangling.sock"), Code::NotFound, "does not exist"),
    ];
    for (request, code, rule) in cases {
        let status = register(&bench, request).await.unwrap_err();
        assert!(
            status.code() == code && status.message().contains(rule),
            "{rule}: {status}"
        );
        assert!(status.message().len() <= 1024, "{rule}");
    }
    // No call counted as a registration. A link to a socket of the directory is one.
    register(&bench, request("link.sock")).await.unwrap();
    assert_eq!(bench.arrived().await, 1);
}

#[tokio::test]
async fn every_call_naming_resource_is_counted() {
    let bench = serving().await;
    let plugin = bench.plugin(Script::ok(), &[]);
    let good = request(&plugin.options().endpoint);
    let named = |name: &str| wire::RegisterRequest {
        resource_name: name.into(),
        ..request("none.sock")
    };
    let old = wire::RegisterRequest {
        version: "v1alpha1".into(),
        ..named("old.example.com/device")
    };
    for refused in [old, named("none.example.com/device"), named("cpu")] {
        register(&bench, refused).await.unwrap_err();
    }
    register(&bench, good.clone()).await.unwrap();
    register(&bench, good).await.unwrap();
    let counted = [
        "old.example.com/device",
        "none.example.com/device",
        RESOURCE,
        RESOURCE,
    ];
    assert_eq!(bench.calls(), counted);
}

#[tokio::test]
async fn plugin_not_serving_gets_the_reason() {
    let bench = serving().await;
    let socket = bench.dir.path().join("dead.sock");
    drop(StdListener::bind(&socket).unwrap());
    let status = register(&bench, request("dead.sock")).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status.message().contains("dead.sock: Connection refused"),
        "{status}"
    );
    let plugin = bench.plugin(
        Script::ok().options(ScriptedOutcome::refuse("not ready")),
        &[],
    );
    let status = plugin.register().await.unwrap_err();
    assert!(status.message().contains("not ready"), "{status}");
}

#[tokio::test]
async fn watching_plugin_registers_after_restart() {
    let mut bench = Bench::new();
    let options = Options::new(RESOURCE, bench.dir.path());
    let plugin = std::sync::Arc::new(Plugin::unregistered(options, Script::ok()).unwrap());
    plugin.list(vec![Device::healthy("a")]);
    let keeping = plugin.clone();
    tokio::spawn(async move { keeping.keep_registered().await });
    for round in 1..=3 {
        let tasks = bench.tasks.child();
        start(&bench, &tasks).await;
        // The end of the plugin before the restart may be reported first.
        let id = loop {
            use crate::endpoints::tests::Report;
            match bench.report().await {
                Report::Listed(id, devices) if devices == ["a"] && id >= round => break id,
                Report::Listed(..) | Report::Arrived(..) | Report::Left(..) => {}
            }
        };
        assert!(id >= round);
        while plugin.event().await != Event::Registered {}
        assert!(tasks.drain(Duration::from_secs(10)).await);
    }
}
