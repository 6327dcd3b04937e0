//! A full disk: nothing new is taken on, nothing that was answered is lost, and space is enough to go on.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::machine::skip;
use nodedock_tests::{Daemon, Options, Root};

const GPUS: usize = 200;

/// Writes until nothing more fits.
fn fill(file: &std::path::Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(file).unwrap();
    for size in [4096, 1] {
        while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
    }
}

#[tokio::test]
async fn a_full_disk_refuses_what_is_new_and_loses_nothing() {
    let mut root = Root::new();
    if let Err(why) = root.mount_state("size=4m") {
        return skip("a full disk", &why);
    }
    let mut daemon = Daemon::start_on(root, Options::default()).await;
    daemon.install_gpus(&format!("pools: [{{name: gpus, count: {GPUS}}}]\n"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    let asked = |index: usize| {
        let name = format!("c-{index}");
        request(&pod(&name), &[&gpu_claim(&name, &[&format!("gpus/gpu-{index}")])])
    };
    daemon.prepared(asked(0)).await;
    let filler = daemon.state().join("filler");
    fill(&filler);

    let mut prepared = vec![0];
    let problem = loop {
        let index = prepared.len();
        assert!(index < GPUS, "the disk is full, and {index} claims were prepared all the same");
        let mut answer = daemon.prepare(asked(index)).await;
        match answer.claims.remove(0).problem {
            None => prepared.push(index),
            Some(problem) => break problem,
        }
    };
    assert_eq!((problem.kind.as_str(), problem.code.as_str()), ("unavailable", "checkpoint-disk-full"));
    let refused = prepared.len();
    assert_eq!(daemon.refused(asked(refused)).await.code, "checkpoint-disk-full", "and so is the next");
    for index in &prepared {
        let name = format!("c-{index}");
        assert_eq!(daemon.pod_devices(&pod(&name)).await.unwrap().containers.len(), 1, "{name}");
        daemon.prepared(asked(*index)).await;
    }
    assert_eq!(daemon.claims().await.iter().filter(|claim| claim.state == "prepared").count(), refused);
    assert!(daemon.cdi_files().len() >= refused);

    std::fs::remove_file(&filler).unwrap();
    daemon.prepared(asked(refused)).await;
    let given_up = daemon.unprepare(&pod("c-0")).await;
    assert_eq!(given_up, [("c-0".to_owned(), "unprepared".to_owned())]);
    daemon.crash().await;
    let known = daemon.claims().await;
    assert_eq!(
        (known.len(), known.iter().all(|claim| claim.state == "prepared")),
        (refused, true),
        "{known:?}"
    );
}
