//! CDI files agree with the claims while the daemon runs, regardless of changes by others; the daemon reports the files that it cannot
//! repair.

use std::path::{Path, PathBuf};

use nodedock_proto::node::v1;
use nodedock_tests::cdi::CdiFile;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::wait::until_path;
use nodedock_tests::{Daemon, Root};

use crate::with_gpus;

/// Log message when a problem begins; the next one is for its end.
const BEGINS: &str = "the node has a problem";
const ENDS: &str = "the node's problem is over";

async fn until_there(file: &CdiFile) {
    let dir = file.path.parent().unwrap();
    until_path(
        dir,
        "the file is what the claim says",
        || match std::fs::read_to_string(&file.path) {
            Ok(text) if text == file.text => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await;
}

/// Waits until the log has so many lines about a code.
async fn until_said(root: &Root, words: &str, code: &str, times: usize) {
    let said = || {
        let log = root.log();
        let lines = log
            .lines()
            .filter(|line| line.contains(words) && line.contains(code))
            .count();
        if lines >= times { Ok(()) } else { Err(log) }
    };
    until_path(
        &root.log_path(),
        &format!("the log says {words:?} of {code}"),
        said,
    )
    .await;
}

async fn one_claim(daemon: &Daemon) -> (v1::PreparePodRequest, CdiFile) {
    let request = request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]);
    daemon.prepared(request.clone()).await;
    (request, daemon.only_cdi_file())
}

/// Another program's file with a device.
fn put_foreign(dir: &Path, device: &str) -> PathBuf {
    let (kind, name) = device.split_once('=').unwrap();
    let path = dir.join("theirs.json");
    let device = format!(r#"{{"name":"{name}","containerEdits":{{"env":["A=b"]}}}}"#);
    std::fs::write(
        &path,
        format!(r#"{{"cdiVersion":"0.5.0","kind":"{kind}","devices":[{device}]}}"#),
    )
    .unwrap();
    path
}

#[tokio::test]
async fn damaged_cdi_file_is_rendered_again() {
    let daemon = with_gpus().await;
    let (_, file) = one_claim(&daemon).await;
    let altered = file.text.replace("gpu-0", "gpu-1");
    std::fs::remove_file(&file.path).unwrap();
    daemon.pod_devices(&pod("one")).await.unwrap();
    assert_eq!(daemon.only_cdi_file(), file, "before the answer");
    std::fs::remove_file(&file.path).unwrap();
    until_there(&file).await;
    for text in ["", &file.text[..file.text.len() / 2], &altered] {
        std::fs::write(&file.path, text).unwrap();
        until_there(&file).await;
    }
    let beside = daemon.write("beside", &altered);
    std::fs::rename(beside, &file.path).unwrap();
    until_there(&file).await;
    assert_eq!(daemon.only_cdi_file(), file);
    assert!(!daemon.log().contains(BEGINS), "{}", daemon.log());
}

#[tokio::test]
async fn removed_directory_is_recreated_and_watched() {
    let daemon = with_gpus().await;
    let (_, file) = one_claim(&daemon).await;
    let dir = daemon.cdi();
    for _ in 0..2 {
        // A file may be rendered again between the removal of the last one and that of the directory.
        while let Err(error) = std::fs::remove_dir_all(&dir) {
            assert_eq!(error.kind(), std::io::ErrorKind::DirectoryNotEmpty);
        }
        let there = || {
            if dir.is_dir() {
                Ok(())
            } else {
                Err("it is not there".to_owned())
            }
        };
        until_path(dir.parent().unwrap(), "the directory is there again", there).await;
        until_there(&file).await;
        std::fs::remove_file(&file.path).unwrap();
        until_there(&file).await;
    }
    let away = daemon.path().join("away");
    std::fs::rename(&dir, &away).unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    until_there(&file).await;
}

#[tokio::test]
async fn foreign_cdi_device_name_is_refused() {
    let daemon = with_gpus().await;
    let (request, file) = one_claim(&daemon).await;
    let device = &file.devices()[0];
    let theirs = put_foreign(&daemon.cdi(), device);
    until_said(&daemon, BEGINS, "cdi-device-claimed-twice", 1).await;
    let problem = daemon
        .refused_as(request.clone(), "conflict", "cdi-device-claimed-twice")
        .await;
    assert_eq!(problem.details["file"], theirs.to_str().unwrap());
    assert_eq!(&problem.details["device"], device);
    assert_eq!(
        daemon.only_claim().await.state,
        "prepared",
        "only the answer is refused"
    );

    std::fs::remove_file(&theirs).unwrap();
    until_said(&daemon, ENDS, "cdi-device-claimed-twice", 1).await;
    daemon.prepared(request.clone()).await;

    // Ours override the specs in the directory of static specs.
    let fixed = daemon.path().join("etc/cdi");
    std::fs::create_dir_all(&fixed).unwrap();
    put_foreign(&fixed, device);
    daemon.prepared(request.clone()).await;
    put_foreign(&daemon.cdi(), device);
    until_said(&daemon, BEGINS, "cdi-device-claimed-twice", 2).await;
    daemon.refused(request.clone()).await;
    daemon.unprepare(&request.pod.unwrap()).await;
    until_said(&daemon, ENDS, "cdi-device-claimed-twice", 2).await;
    assert!(theirs.is_file(), "it is not ours to remove");
}
