//! CDI files of device plugins' answers, read by the CDI library: a container gets device nodes for all paths that a plugin names.

use std::os::unix::fs::symlink;
use std::path::Path;

use native_device_plugin::{
    Device, Options as PluginOptions, Plugin, Script, ScriptedOutcome, api,
};
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options};
use rustix::fs::{CWD, FileType, makedev, mknodat};
use serde_json::{Value, json};

use crate::{lines, programs};

const RESOURCE: &str = "example.com/thing";
const ADAPTER: &str = "devicePluginAdapters: [{resource: example.com/thing, driver: thing.example.com, pool: things}]\n";

/// A directory of device nodes, as `/dev/snd`, and links to nodes.
fn fill(directory: &Path) -> Result<(), String> {
    let sound = directory.join("snd");
    std::fs::create_dir_all(sound.join("by-path")).expect("it is made");
    for (name, minor) in [("controlC0", 3), ("by-path/pcm", 5)] {
        mknodat(
            CWD,
            sound.join(name),
            FileType::CharacterDevice,
            0o600.into(),
            makedev(1, minor),
        )
        .map_err(|error| format!("mknod: {error}"))?;
    }
    symlink("controlC0", sound.join("link")).expect("it is made");
    symlink("/dev/zero", directory.join("absolute")).expect("it is made");
    symlink("snd/controlC0", directory.join("relative")).expect("it is made");
    symlink("snd", directory.join("sound")).expect("it is made");
    symlink("loop", directory.join("loop")).expect("it is made");
    std::fs::create_dir(directory.join("empty")).expect("it is made");
    std::fs::write(directory.join("file"), "").expect("it is made");
    Ok(())
}

fn nodes(specs: &[(&str, &str)]) -> ScriptedOutcome {
    let node = |(host, inside): &(&str, &str)| api::DeviceSpec {
        host_path: (*host).to_owned(),
        container_path: (*inside).to_owned(),
        permissions: "mrw".to_owned(),
    };
    ScriptedOutcome::container(api::ContainerAllocateResponse {
        devices: specs.iter().map(node).collect(),
        ..Default::default()
    })
}

fn claiming(name: &str) -> nodedock_proto::node::v1::PreparePodRequest {
    let device = format!("thing.example.com/things/{name}");
    request(
        &pod(name),
        &[&claim(&format!("claim-of-{name}"), &[&device])],
    )
}

/// Paths and numbers of nodes.
fn numbers(nodes: &Value) -> Vec<(String, i64, i64)> {
    let nodes = nodes.as_array().expect("a list").iter().map(|node| {
        assert_eq!(node["type"], "c", "{node}");
        let number = |key: &str| node[key].as_i64().expect("a number");
        (
            node["path"].as_str().expect("a path").to_owned(),
            number("major"),
            number("minor"),
        )
    });
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort();
    nodes
}

/// `prepared`, and the device nodes of the file had no type and no numbers, so that no container started (kubernetes#128784).
#[tokio::test]
async fn every_device_node_has_type_numbers() {
    let directory = tempfile::tempdir().expect("a directory");
    let found =
        programs::go("cdi-files").and_then(|program| fill(directory.path()).map(|()| program));
    let Some(program) = or_skip("CDI files of device plugins, by the CDI library", found) else {
        return;
    };
    let here = directory.path().to_str().expect("UTF-8").to_owned();
    let at = |name: &str| format!("{here}/{name}");
    let good = [
        (
            "plain",
            vec![("/dev/null".to_owned(), "/dev/null")],
            vec![("/dev/null", 3)],
        ),
        (
            "absolute",
            vec![(at("absolute"), "/dev/ttyA")],
            vec![("/dev/ttyA", 5)],
        ),
        (
            "relative",
            vec![(at("relative"), "/dev/ttyB")],
            vec![("/dev/ttyB", 3)],
        ),
        (
            "directory",
            vec![(at("snd"), "/dev/snd")],
            vec![("/dev/snd/by-path/pcm", 5), ("/dev/snd/controlC0", 3)],
        ),
        (
            "sound",
            vec![(at("sound"), "/s")],
            vec![("/s/by-path/pcm", 5), ("/s/controlC0", 3)],
        ),
        (
            "twice",
            vec![(at("snd/controlC0"), "/dev/c"), (at("relative"), "/dev/c")],
            vec![("/dev/c", 3)],
        ),
    ];
    let bad = [
        (
            "missing",
            vec![(at("none"), "/dev/a")],
            "allocation-path-missing",
        ),
        (
            "loop",
            vec![(at("loop"), "/dev/a")],
            "allocation-path-missing",
        ),
        (
            "file",
            vec![(at("file"), "/dev/a")],
            "allocation-node-invalid",
        ),
        (
            "empty",
            vec![(at("empty"), "/dev/a")],
            "allocation-node-invalid",
        ),
        (
            "conflict",
            vec![(at("relative"), "/dev/a"), (at("absolute"), "/dev/a")],
            "allocation-node-invalid",
        ),
        (
            "unrooted",
            vec![("dev/null".to_owned(), "/dev/a")],
            "driver-answer-not-valid",
        ),
    ];
    let answers: Vec<(String, Vec<(String, &str)>)> =
        (good.iter().map(|(name, specs, _)| (name, specs)))
            .chain(bad.iter().map(|(name, specs, _)| (name, specs)))
            .map(|(name, specs)| ((*name).to_owned(), specs.clone()))
            .collect();
    let devices = answers
        .iter()
        .map(|(name, _)| Device::healthy(name))
        .collect();
    let script = Script::new(move |ids| {
        let (_, specs) = answers
            .iter()
            .find(|(name, _)| *name == ids[0])
            .expect("a device of the list");
        nodes(
            &specs
                .iter()
                .map(|(host, inside)| (host.as_str(), *inside))
                .collect::<Vec<_>>(),
        )
    });
    let daemon = Daemon::start_with(Options::default().config(ADAPTER)).await;
    let options = PluginOptions::new(RESOURCE, &daemon.state().join("device-plugins"));
    let _plugin = Plugin::start(options, script, devices)
        .await
        .expect("it registers");
    daemon
        .until_allocatable(RESOURCE, good.len() + bad.len())
        .await;

    for (name, _, _) in &good {
        daemon.prepared(claiming(name)).await;
    }
    for (name, _, code) in &bad {
        assert_eq!(daemon.refused(claiming(name)).await.code, *code, "{name}");
    }
    let cdi = daemon.cdi();
    let read = lines(&program, &[cdi.to_str().expect("UTF-8")])
        .await
        .concat();
    let read: Value = serde_json::from_str(&read).expect("JSON");
    let read = read.as_object().expect("an object");
    assert_eq!(read.len(), good.len(), "{read:#?}");
    for (name, _, expected) in &good {
        let expected: Vec<_> = expected
            .iter()
            .map(|(path, minor)| ((*path).to_owned(), 1, *minor))
            .collect();
        let of = |(device, _): &(&String, &Value)| device.ends_with(&format!("-{name}"));
        let (_, device) = read
            .iter()
            .find(of)
            .unwrap_or_else(|| panic!("{name}: {read:#?}"));
        assert_eq!(numbers(&device["file"]), expected, "{name}");
        assert_eq!(numbers(&device["container"]), expected, "{name}");
    }

    // A device that is plugged in again has another number: the plugin is called again.
    std::fs::remove_file(at("snd/controlC0")).expect("it is removed");
    mknodat(
        CWD,
        at("snd/controlC0"),
        FileType::CharacterDevice,
        0o600.into(),
        makedev(1, 7),
    )
    .expect("a node");
    daemon.prepared(claiming("relative")).await;
    let read = lines(&program, &[cdi.to_str().expect("UTF-8")])
        .await
        .concat();
    let read: Value = serde_json::from_str(&read).expect("JSON");
    let moved = read
        .as_object()
        .expect("an object")
        .iter()
        .find(|(name, _)| name.ends_with("-relative"));
    assert_eq!(
        moved.expect("its device").1["container"][0]["minor"],
        json!(7)
    );
}
