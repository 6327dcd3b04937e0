//! A daemon that is killed knows afterwards what it answered before, and makes the CDI directory agree with it.

use std::path::Path;

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::wait::until_path;
use serde_json::{Value, json};

use crate::with_gpus;

async fn until_there(dir: &Path, file: &Path, there: bool) {
    until_path(dir, &format!("{} exists: {there}", file.display()), || {
        if file.exists() == there { Ok(()) } else { Err(format!("it exists: {}", !there)) }
    })
    .await;
}

#[tokio::test]
async fn a_killed_daemon_gives_the_same_answer_as_before() {
    let mut daemon = with_gpus().await;
    let pod = pod("one");
    let request =
        request(&pod, &[&gpu_claim("a", &["gpus/gpu-0", "gpus/gpu-1"]), &gpu_claim("b", &["shared/gpu-4"])]);
    let answer = daemon.prepared(request.clone()).await;
    let (claims, files) = (daemon.claims().await, daemon.cdi_files());
    daemon.crash().await;
    assert_eq!(daemon.claims().await, claims);
    assert_eq!(daemon.pod_devices(&pod).await.unwrap(), answer, "without any driver");
    assert_eq!(daemon.cdi_files(), files);
    assert_eq!(daemon.prepared(request).await, answer);
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(daemon.unprepare(&pod).await.len(), 2);
    assert_eq!((daemon.claims().await, daemon.cdi_files()), (vec![], vec![]));
}

#[tokio::test]
async fn a_lost_cdi_file_is_there_again_before_the_answer() {
    let daemon = with_gpus().await;
    let request = request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]);
    let answer = daemon.prepared(request.clone()).await;
    let file = daemon.only_cdi_file();
    std::fs::remove_file(&file.path).unwrap();
    assert_eq!(daemon.prepared(request.clone()).await, answer);
    assert_eq!(daemon.only_cdi_file(), file);
    std::fs::remove_file(&file.path).unwrap();
    assert_eq!(daemon.pod_devices(&pod("one")).await.unwrap(), answer);
    assert_eq!(daemon.only_cdi_file(), file);

    std::fs::write(&file.path, file.text.replace("gpu-0", "gpu-1")).unwrap();
    daemon.prepared(request).await;
    assert_eq!(daemon.only_cdi_file(), file, "a changed file is repaired");
}

#[tokio::test]
async fn a_start_renders_lost_files_and_removes_those_that_no_claim_owns() {
    let mut daemon = with_gpus().await;
    daemon.prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])])).await;
    let file = daemon.only_cdi_file();
    daemon.kill9().await;

    let dir = daemon.cdi();
    std::fs::remove_file(&file.path).unwrap();
    let orphan = dir.join("mock-gpu.nodedock.dev_claim-gone.yaml");
    std::fs::write(&orphan, file.text.replace("claim-a", "claim-gone")).unwrap();
    let foreign = [
        ("vendor.json", r#"{"cdiVersion":"0.5.0","kind":"vendor.example/gpu","devices":[]}"#),
        ("theirs.yaml", "# by hand\ncdiVersion: 0.5.0\n"),
        ("nodedock.txt", "notes"),
    ];
    foreign.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).unwrap());

    daemon.run().await;
    until_there(&dir, &file.path, true).await;
    until_there(&dir, &orphan, false).await;
    assert_eq!(daemon.only_cdi_file(), file);
    for (name, text) in foreign {
        assert_eq!(std::fs::read_to_string(dir.join(name)).unwrap(), text, "{name} is not ours");
    }
}

#[tokio::test]
async fn a_checkpoint_is_good_after_a_crash_and_read_beside_a_daemon() {
    let mut daemon = with_gpus().await;
    daemon.prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])])).await;
    for running in [true, false] {
        if !running {
            daemon.kill9().await;
        }
        let report = daemon.cli(&["checkpoint", "verify", "-o", "json"]).await.json();
        assert_eq!((&report["claims"], &report["pods"]), (&json!(1), &json!(1)), "{report}");
        let dump = daemon.cli(&["checkpoint", "dump", "-o", "json"]).await.json();
        assert_eq!(dump["claims"][0]["id"]["uid"], json!("claim-a"), "running: {running}");
        assert_eq!(dump["claims"][0]["state"], json!("prepared"));
    }
    let table = daemon.cli(&["checkpoint", "dump"]).await.done();
    assert!(table.contains("default/a"), "{table}");
    let cut = daemon.write("cut.redb", &std::fs::read(daemon.checkpoint()).unwrap()[..3000]);
    let said = daemon.cli(&["checkpoint", "verify", cut.to_str().unwrap()]).await.failed(1);
    assert!(said.contains("cut.redb"), "{said}");
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.restart().await;
    let report = daemon.cli(&["checkpoint", "verify"]).await.done();
    assert!(report.contains("1 claims"), "{report}");
}

#[tokio::test]
async fn a_lost_checkpoint_is_set_aside_and_its_claims_are_taken_back_from_the_cdi_files() {
    let mut daemon = with_gpus().await;
    daemon.prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])])).await;
    let file = daemon.only_cdi_file();
    daemon.kill9().await;
    std::fs::write(daemon.checkpoint(), "not a database").unwrap();
    daemon.run().await;
    daemon.until_log("set aside").await;
    let aside: Vec<_> = std::fs::read_dir(daemon.state())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("checkpoint.redb") && name != "checkpoint.redb")
        .collect();
    assert_eq!(aside.len(), 1, "{aside:?}");
    let kept = std::fs::read_to_string(daemon.state().join(&aside[0])).unwrap();
    assert_eq!(kept, "not a database", "nothing is thrown away");
    let claim = daemon.only_claim().await;
    assert_eq!((claim.id.unwrap().uid.as_str(), claim.pods), ("claim-a", vec![pod("one")]));
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(daemon.only_cdi_file(), file, "it is in use, and no orphan");
    daemon.prepared(request(&pod("two"), &[&gpu_claim("b", &["gpus/gpu-1"])])).await;
    let known: Value = daemon.cli(&["get", "claims", "default/b", "-o", "json"]).await.json();
    assert_eq!(known[0]["state"], json!("prepared"));
    assert_eq!(daemon.unprepare(&pod("one")).await, [("a".to_owned(), "unprepared".to_owned())]);
}
