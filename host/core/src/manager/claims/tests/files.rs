//! CDI files as derived state: after any change they are restored to the content of the claims, or the reason why not is reported.

use std::path::Path;

use super::super::ClaimEnd;
use super::PREPARED;
use crate::manager::claims::fixtures::{claim, permanent, pod, uid};
use crate::manager::tests::scene::{
    Daemon, Reply, cdi_devices, ends, with_claim, with_gpu, with_prepared,
};
use nodedock_model::{ClaimState, DeviceAccess, DeviceNode, Edits, Mount, NodeKind};

const NAME: &str = "gpu.example.com_uid-one.yaml";
const SUBJECT: &str = "claim default/one";

/// A file of another program with devices, as `KIND` and names.
fn put(daemon: &Daemon, file: &str, kind: &str, devices: &[&str]) -> std::path::PathBuf {
    let devices: Vec<_> = devices
        .iter()
        .map(|name| format!("{{name: {name}}}"))
        .collect();
    let path = daemon.cdi.join(file);
    let text = format!(
        "cdiVersion: 0.5.0\nkind: {kind}\ndevices: [{}]\n",
        devices.join(", ")
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn condition(code: &str) -> Vec<(String, String)> {
    vec![(code.to_owned(), SUBJECT.to_owned())]
}

fn notes(daemon: &Daemon) -> Vec<String> {
    let claims = daemon.manager.records.claims();
    let entries = claims[0]
        .timeline
        .iter()
        .filter(|entry| entry.what.contains("CDI files"));
    entries.map(|entry| entry.what.clone()).collect()
}

fn native(name: &str) -> Reply {
    Reply::Access(DeviceAccess::CdiDevices(vec![name.to_owned()]))
}

fn null_node(minor: u32) -> Reply {
    let node = DeviceNode {
        path: "/dev/null".to_owned(),
        host_path: None,
        kind: Some(NodeKind::Character),
        major: Some(1),
        minor: Some(minor),
        permissions: "rw".to_owned(),
        file_mode: None,
        uid: None,
        gid: None,
    };
    Reply::Access(DeviceAccess::Edits(Edits {
        device_nodes: vec![node],
        ..Edits::default()
    }))
}

#[tokio::test]
async fn damaged_file_is_rendered_again() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    let path = daemon.cdi.join(NAME);
    let whole = std::fs::read(&path).unwrap();
    let damage: [fn(&Path); 4] = [
        |path| std::fs::remove_file(path).unwrap(),
        |path| std::fs::write(path, "").unwrap(),
        |path| {
            let bytes = std::fs::read(path).unwrap();
            std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        },
        |path| {
            let text = std::fs::read_to_string(path)
                .unwrap()
                .replace("MEMO", "EVIL");
            std::fs::write(path.with_extension("new"), text).unwrap();
            std::fs::rename(path.with_extension("new"), path).unwrap();
        },
    ];
    for damage in damage {
        damage(&path);
        daemon.touched(&[NAME]).await;
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        damage(&path);
        daemon.sweep().await;
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        damage(&path);
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
        assert_eq!(std::fs::read(&path).unwrap(), whole, "before the answer");
    }
    std::fs::remove_dir_all(&daemon.cdi).unwrap();
    daemon.sweep().await;
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    assert_eq!((daemon.conditions(), gpu.counts()), (vec![], (1, 0)));
}

/// Nothing is synced, so a power loss between the rename and anything else leaves one of these.
#[tokio::test]
async fn power_loss_is_repaired_before_answering() {
    let (home, daemon, a, gpu) = with_prepared().await;
    let path = daemon.cdi.join(NAME);
    let (whole, claims) = (
        std::fs::read(&path).unwrap(),
        daemon.manager.records.claims(),
    );
    daemon.crash().await;
    let losses: [&dyn Fn() -> std::io::Result<()>; 4] = [
        &|| std::fs::remove_file(&path),
        &|| std::fs::write(&path, ""),
        &|| std::fs::write(&path, &whole[..whole.len() / 2]),
        &|| {
            std::fs::rename(
                &path,
                home.sys().join("a temporary file that was never renamed"),
            )
        },
    ];
    for lose in losses {
        lose().unwrap();
        let daemon = home.start();
        daemon.source.put(claim("one", &["gpu/0"], &[&a]));
        daemon.serve(&gpu);
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(daemon.manager.records.claims(), claims);
        daemon.crash().await;
    }
    assert_eq!(gpu.counts(), (1, 0), "the record suffices");
}

#[tokio::test]
async fn foreign_file_is_kept_and_reported() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    let path = daemon.cdi.join(NAME);
    let whole = std::fs::read(&path).unwrap();
    let put: [fn(&Path); 3] = [
        |path| std::fs::write(path, "# by hand\n").unwrap(),
        |path| std::fs::create_dir(path).unwrap(),
        |path| std::os::unix::fs::symlink("/dev/null", path).unwrap(),
    ];
    for put in put {
        std::fs::remove_file(&path).unwrap();
        put(&path);
        daemon.touched(&[NAME]).await;
        assert_eq!(daemon.conditions(), condition("cdi-file-foreign"));
        assert_eq!(
            ends(&daemon.prepare(&a, &["one"]).await),
            ["cdi-file-foreign"]
        );
        daemon.sweep().await;
        assert_eq!(daemon.conditions(), condition("cdi-file-foreign"));
        if path.is_dir() {
            std::fs::remove_dir(&path)
        } else {
            std::fs::remove_file(&path)
        }
        .unwrap();
        daemon.touched(&[NAME]).await;
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(daemon.conditions(), []);
    }
    assert_eq!(gpu.counts(), (1, 0));
}

/// One claim's foreign file kept the claims that came with it from being answered.
#[tokio::test]
async fn foreign_file_refuses_only_its_claim() {
    let (_home, daemon, a, _gpu) = with_claim();
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    std::fs::write(daemon.cdi.join(NAME), "# by hand\n").unwrap();
    let outcome = daemon.prepare(&a, &["one", "two"]).await;
    assert_eq!(ends(&outcome), ["cdi-file-foreign", "prepared"]);
    assert_eq!(daemon.conditions(), condition("cdi-file-foreign"));
    assert_eq!(
        daemon.unprepare(&a).await,
        [Ok(ClaimEnd::Unprepared), Ok(ClaimEnd::Unprepared)]
    );
    assert_eq!(
        daemon.conditions(),
        [],
        "a claim that is gone has no troubles"
    );
    assert_eq!(daemon.cdi_files(), [daemon.cdi.join(NAME)]);
}

#[tokio::test]
async fn device_in_foreign_file_is_refused() {
    let (_home, daemon, a, gpu) = with_claim();
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    let theirs = put(
        &daemon,
        "theirs.yaml",
        "gpu.example.com/claim",
        &["uid-one-0"],
    );
    let outcome = daemon.prepare(&a, &["one", "two"]).await;
    assert_eq!(ends(&outcome), ["cdi-device-claimed-twice", "prepared"]);
    let problem = outcome.claims[0].end.as_ref().unwrap_err();
    let details = [
        ("file", theirs.to_str().unwrap()),
        ("device", "gpu.example.com/claim=uid-one-0"),
    ];
    assert_eq!(
        problem.details,
        details.map(|(key, value)| (key.to_owned(), value.to_owned()))
    );
    assert_eq!(
        (daemon.state("uid-one"), outcome.containers.len()),
        (PREPARED, 0)
    );
    assert_eq!(daemon.conditions(), condition("cdi-device-claimed-twice"));

    std::fs::remove_file(&theirs).unwrap();
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["prepared", "prepared"]
    );
    assert_eq!((daemon.conditions(), gpu.counts()), (vec![], (1, 0)));

    put(
        &daemon,
        "theirs.yaml",
        "gpu.example.com/claim",
        &["uid-one-0", "uid-gone-0"],
    );
    daemon.touched(&["theirs.yaml"]).await;
    assert_eq!(
        daemon.conditions(),
        condition("cdi-device-claimed-twice"),
        "found by the name of the device"
    );
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["cdi-device-claimed-twice", "prepared"]
    );
    // In its place, which leaves the directory as it is.
    put(
        &daemon,
        "theirs.yaml",
        "gpu.example.com/claim",
        &["uid-other-0"],
    );
    daemon.touched(&["theirs.yaml"]).await;
    assert_eq!(daemon.conditions(), []);
    put(
        &daemon,
        "theirs.yaml",
        "gpu.example.com/claim",
        &["uid-one-0", "x"],
    );
    daemon.sweep().await;
    assert_eq!(daemon.conditions(), condition("cdi-device-claimed-twice"));
    assert_eq!(daemon.unprepare(&a).await.len(), 2);
    assert_eq!(daemon.conditions(), []);
}

#[tokio::test]
async fn stale_files_and_copies_are_removed() {
    let (_home, daemon, a, _gpu) = with_prepared().await;
    let (path, copy) = (daemon.cdi.join(NAME), daemon.cdi.join("copy.yaml"));
    let bytes = std::fs::read(&path).unwrap();
    for sweeps in [false, true] {
        std::fs::write(&copy, &bytes).unwrap();
        if sweeps {
            daemon.sweep().await
        } else {
            daemon.touched(&["copy.yaml"]).await
        };
        assert_eq!(daemon.cdi_files(), std::slice::from_ref(&path));
    }
    daemon.unprepare(&a).await;
    for sweeps in [false, true] {
        std::fs::write(&path, &bytes).unwrap();
        if sweeps {
            daemon.sweep().await
        } else {
            daemon.touched(&[NAME]).await
        };
        assert_eq!(daemon.cdi_files(), [] as [&Path; 0]);
    }
}

#[tokio::test]
async fn locked_claim_delays_no_other() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/1"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    daemon.prepare(&b, &["two"]).await;
    let files = daemon.cdi_files();
    gpu.shut(true);
    let others = async {
        gpu.called(|calls| calls.unprepare.len() == 1).await;
        files
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
        let busy = daemon.manager.files.sweep_files().await;
        let busy = daemon
            .manager
            .files
            .repair_files(busy.into_iter().chain([uid("uid-one")]).collect())
            .await;
        assert_eq!(busy.into_iter().collect::<Vec<_>>(), [uid("uid-one")]);
        assert_eq!(daemon.cdi_files(), files[1..]);
        gpu.shut(false);
    };
    let (ends, ()) = tokio::join!(daemon.unprepare(&a), others);
    assert_eq!(ends, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(daemon.cdi_files(), files[1..]);
}

#[tokio::test]
async fn missing_plugin_file_is_reported() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", native("vendor.com/gpu=x"));
    let before = daemon.commits();
    let outcome = daemon.prepare(&a, &["one"]).await;
    assert_eq!(
        (ends(&outcome), cdi_devices(&outcome)),
        (vec!["prepared"], vec!["vendor.com/gpu=x".to_owned()])
    );
    assert_eq!(
        daemon.commits() - before,
        2,
        "the note is in the commit of the results"
    );
    assert_eq!(daemon.conditions(), condition("cdi-device-missing"));
    daemon.sweep().await;
    daemon.prepare(&a, &["one"]).await;
    assert_eq!(notes(&daemon).len(), 1, "it is noted once");

    let theirs = put(&daemon, "vendor.yaml", "vendor.com/gpu", &["x", "y"]);
    daemon.touched(&["vendor.yaml"]).await;
    assert_eq!((daemon.conditions(), notes(&daemon).len()), (vec![], 2));
    std::fs::remove_file(&theirs).unwrap();
    daemon.sweep().await;
    assert_eq!(
        (daemon.conditions(), notes(&daemon).len()),
        (condition("cdi-device-missing"), 3)
    );
    put(&daemon, "vendor.yaml", "vendor.com/gpu", &["x"]);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!((daemon.conditions(), notes(&daemon).len()), (vec![], 4));
    assert_eq!(gpu.counts(), (1, 0));
    assert_eq!(
        daemon.cdi_files().len(),
        1,
        "a plugin's file is never written nor removed"
    );
}

/// A pod that no longer used a claim held it again after the loss of the checkpoint.
#[tokio::test]
async fn file_names_current_pods() {
    let ((_home, daemon, a, _gpu), b) = (with_gpu(), pod("b"));
    daemon.source.put(claim("one", &["gpu/0"], &[&a, &b]));
    daemon.prepare(&a, &["one"]).await;
    daemon.prepare(&b, &["one"]).await;
    let names = |uid: &str| {
        std::fs::read_to_string(daemon.cdi.join(NAME))
            .unwrap()
            .contains(uid)
    };
    assert!(names("uid-a") && names("uid-b"));
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Kept)]);
    assert!(!names("uid-a") && names("uid-b"));
}

#[tokio::test]
async fn lost_files_are_repaired_before_reporting() {
    let (_home, daemon, a, _gpu) = with_prepared().await;
    std::fs::remove_file(daemon.cdi.join(NAME)).unwrap();
    daemon
        .manager
        .files
        .check_files_of(a.uid.as_str())
        .await
        .unwrap();
    std::fs::write(daemon.cdi.join(NAME), "kind: vendor.com/gpu").unwrap();
    assert_eq!(
        daemon
            .manager
            .files
            .check_files_of(a.uid.as_str())
            .await
            .unwrap_err()
            .code,
        "cdi-file-foreign"
    );
    assert_eq!(
        daemon.manager.files.check_files_of("uid-unknown").await,
        Ok(())
    );
}

#[tokio::test]
async fn renumbered_node_is_prepared_again() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", null_node(3));
    daemon.prepare(&a, &["one"]).await;
    daemon.prepare(&a, &["one"]).await;
    assert_eq!(gpu.counts(), (1, 0), "the node is what it was");
    daemon.unprepare(&a).await;

    gpu.reply("uid-one", null_node(99));
    daemon.prepare(&a, &["one"]).await;
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["bad-parameters"]
    );
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Preparing));
    assert_eq!(
        daemon.cdi_files(),
        [] as [&Path; 0],
        "the old numbers are not given any more"
    );
    gpu.reply("uid-one", null_node(3));
    daemon.serve(&gpu);
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["prepared"],
        "a driver that serves again is called again"
    );
    let text = std::fs::read_to_string(daemon.cdi.join(NAME)).unwrap();
    assert!(text.contains(r#""major":1,"minor":3"#), "{text}");
    assert_eq!(gpu.counts(), (4, 1));
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
}

#[tokio::test]
async fn changed_node_is_reported_until_prepared() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", null_node(99));
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    daemon.prepare(&a, &["one", "two"]).await;
    assert_eq!(daemon.conditions(), [], "a prepare has looked itself");
    let files = daemon.cdi_files();
    daemon.sweep().await;
    assert_eq!(daemon.conditions(), condition("device-node-moved"));
    let problem = daemon.conditions.list().remove(0).problem;
    for part in [
        "/dev/null",
        "default/one",
        "character device 1:99",
        "character device 1:3",
        "gpu.example.com",
    ] {
        assert!(problem.message.contains(part), "{problem}");
    }
    daemon.touched(&[NAME]).await;
    assert_eq!(
        (daemon.conditions(), daemon.cdi_files()),
        (condition("device-node-moved"), files)
    );
    assert_eq!(
        (daemon.state("uid-one"), gpu.counts()),
        (PREPARED, (1, 0)),
        "it is said, and nothing more"
    );

    gpu.reply("uid-one", null_node(3));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["prepared"; 2]
    );
    assert_eq!(daemon.conditions(), []);
    daemon.sweep().await;
    assert_eq!(daemon.conditions(), []);
}

/// A driver's mount was checked when it answered. Then another user exchanged a directory on the way for a link, and the next answers repeated the path.
#[tokio::test]
async fn source_made_unsafe_is_not_repeated() {
    use std::os::unix::fs::PermissionsExt;
    // Others may write to /tmp.
    let Ok(vendor) = tempfile::Builder::new()
        .prefix("nodedock-test-")
        .tempdir_in("/opt")
    else {
        return;
    };
    let way = vendor.path().join("way");
    std::fs::create_dir_all(way.join("lib")).unwrap();
    for path in [vendor.path(), &way] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let (_home, daemon, a, gpu) = with_claim();
    let mount = Mount {
        host_path: way.join("lib").to_str().unwrap().to_owned(),
        container_path: "/opt/lib".to_owned(),
        options: vec!["ro".to_owned(), "bind".to_owned()],
        fs_type: None,
    };
    gpu.reply(
        "uid-one",
        Reply::Access(DeviceAccess::Edits(Edits {
            mounts: vec![mount],
            ..Edits::default()
        })),
    );
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);

    std::fs::set_permissions(&way, PermissionsExt::from_mode(0o777)).unwrap();
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["edit-source-unsafe"]
    );
    assert_eq!(daemon.conditions(), condition("edit-source-unsafe"));
    std::fs::set_permissions(&way, PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!(daemon.conditions(), []);

    std::fs::rename(&way, vendor.path().join("old")).unwrap();
    std::os::unix::fs::symlink("/etc", &way).unwrap();
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["edit-source-unsafe"]
    );
    daemon.sweep().await;
    assert_eq!(
        daemon.conditions(),
        condition("edit-source-unsafe"),
        "it is found without a request as well"
    );
    assert_eq!(
        daemon.unprepare(&a).await,
        [Ok(ClaimEnd::Unprepared)],
        "and the claim ends as any other"
    );
}
