//! A checkpoint that cannot be read is set aside, and what CDI files say of their claims is taken for true.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;

use crate::with_gpus;

#[tokio::test]
async fn claims_are_restored_from_cdi_files() {
    let mut daemon = with_gpus().await;
    let (one, two) = (pod("one"), pod("two"));
    let shared = gpu_claim("a", &["gpus/gpu-0"]);
    daemon.prepared(request(&one, &[&shared])).await;
    daemon.prepared(request(&two, &[&shared])).await;
    let files = daemon.cdi_files();
    daemon.kill9().await;
    std::fs::write(daemon.checkpoint(), "not a checkpoint").unwrap();
    daemon.run().await;

    let claim = daemon.only_claim().await;
    assert_eq!(
        (claim.state.as_str(), claim.pods.len()),
        ("prepared", 2),
        "{claim:?}"
    );
    assert_eq!(
        daemon.cdi_files(),
        files,
        "containers that run keep their devices"
    );
    let kept = std::fs::read_dir(daemon.state())
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let is_aside =
        |path: &std::path::PathBuf| path.to_string_lossy().contains("checkpoint.db.damaged");
    let aside: Vec<_> = kept
        .filter(|path| is_aside(path) && !path.to_string_lossy().ends_with("-wal"))
        .collect();
    assert_eq!(aside.len(), 1, "{aside:?}");
    assert_eq!(std::fs::read(&aside[0]).unwrap(), b"not a checkpoint");

    let conditions = daemon.until_conditions(&["checkpoint-set-aside"]).await;
    assert_eq!(conditions[0].subject, aside[0].to_str().unwrap());
    let problem = conditions[0].problem.as_ref().unwrap();
    assert!(
        problem.message.contains("1 claims were taken back"),
        "{problem:?}"
    );

    daemon.until_serving(MOCK_GPU_FILE).await;
    let problem = daemon
        .refused(request(&pod("three"), &[&gpu_claim("b", &["gpus/gpu-0"])]))
        .await;
    assert_eq!(problem.code, "device-held", "{problem:?}");
    assert_eq!(
        daemon.unprepare(&one).await,
        [("a".to_owned(), "kept".to_owned())]
    );
    assert_eq!(
        daemon.unprepare(&two).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
    daemon.assert_empty().await;
    daemon.restart().await;
    // It is there until the next start.
    daemon.until_conditions(&[]).await;
}

#[tokio::test]
async fn missing_checkpoint_beside_claims_is_reported() {
    let mut daemon = with_gpus().await;
    assert_eq!(
        daemon.node().await.conditions,
        [],
        "the first start of all finds nothing missing"
    );
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let file = daemon.only_cdi_file();
    daemon.kill9().await;
    std::fs::remove_file(daemon.checkpoint()).unwrap();
    // One of ours that cannot be read.
    std::fs::write(
        file.path.with_file_name("nodedock-broken.json"),
        format!("{}nonsense", file.text),
    )
    .unwrap();
    daemon.run().await;
    let conditions = daemon.until_conditions(&["checkpoint-missing"]).await;
    let message = &conditions[0].problem.as_ref().unwrap().message;
    let expected = "1 claims were taken back from CDI files, and 1 of our files there gave none";
    assert!(message.contains(expected), "{message}");
    assert_eq!(conditions[0].subject, daemon.checkpoint().to_str().unwrap());
}
