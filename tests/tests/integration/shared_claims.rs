//! One claim, several pods: the first prepare calls the driver, and so does the last unprepare.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request, reserved};
use serde_json::json;

use crate::with_gpus;

/// How often a driver was called for a claim, as its history says.
fn calls(claim: &v1::ClaimStatus) -> usize {
    claim.timeline.iter().filter(|entry| entry.what.contains("by driver")).count()
}

#[tokio::test]
async fn pods_join_and_leave_a_claim_without_another_call_of_its_driver() {
    let daemon = with_gpus().await;
    let (one, two) = (pod("one"), pod("two"));
    let claim = reserved(gpu_claim("both", &["gpus/gpu-0"]), &two);
    let first = daemon.prepared(request(&one, &[&claim])).await;
    let second = daemon.prepared(request(&two, &[&claim])).await;
    assert_eq!(first.containers, second.containers, "the pods share the device");

    let known = daemon.only_claim().await;
    assert_eq!((known.state.as_str(), known.pods.len(), calls(&known)), ("prepared", 2, 1));
    let file = daemon.only_cdi_file();

    assert_eq!(daemon.unprepare(&one).await, [("both".to_owned(), "kept".to_owned())]);
    assert_eq!(calls(&daemon.only_claim().await), 1);
    assert_eq!(daemon.pod_devices(&two).await.unwrap().containers, second.containers);
    assert_eq!(daemon.only_cdi_file().path, file.path, "the device is in use by the other pod");
    assert_eq!(daemon.pod_devices(&one).await.unwrap_err().code(), tonic::Code::NotFound);

    assert_eq!(daemon.unprepare(&two).await, [("both".to_owned(), "unprepared".to_owned())]);
    daemon.assert_empty().await;
}

#[tokio::test]
async fn a_pod_that_never_prepared_a_claim_cannot_unprepare_it() {
    let daemon = with_gpus().await;
    let (owner, stranger) = (pod("owner"), pod("stranger"));
    let claim = reserved(gpu_claim("mine", &["gpus/gpu-0"]), &stranger);
    daemon.prepared(request(&owner, &[&claim])).await;
    assert_eq!(daemon.unprepare(&stranger).await, []);
    let by_name = daemon.cli(&["unprepare", "default/stranger", "-o", "json"]).await.json();
    assert_eq!(by_name["claims"], json!([]));
    assert_eq!(daemon.only_claim().await.state, "prepared");
    assert_eq!(daemon.cdi_files().len(), 1);
}

#[tokio::test]
async fn a_pod_of_the_same_name_and_another_uid_is_another_pod() {
    let daemon = with_gpus().await;
    let (old, mut new) = (pod("again"), pod("again"));
    new.uid = "pod-again-2".to_owned();
    let claim = reserved(gpu_claim("data", &["gpus/gpu-0"]), &old);
    daemon.prepared(request(&old, &[&claim])).await;
    daemon.prepared(request(&new, &[&claim])).await;
    assert_eq!(daemon.unprepare(&old).await, [("data".to_owned(), "kept".to_owned())]);
    let held = daemon.only_claim().await.pods;
    assert_eq!(held, [new.clone()]);
    let might = v1::PodMightNeedUnprepareRequest { pod_uid: new.uid.clone() };
    assert!(daemon.client().pod_might_need_unprepare(might).await.unwrap().into_inner().might);
    let might = v1::PodMightNeedUnprepareRequest { pod_uid: old.uid };
    assert!(!daemon.client().pod_might_need_unprepare(might).await.unwrap().into_inner().might);
}
