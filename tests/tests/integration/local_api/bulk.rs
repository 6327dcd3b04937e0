//! Many claims of the local API at once: they are deleted in batches, and hold up no other request.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::{api, claim, create, machine};

/// Claims that wait for devices that no machine has.
const CLAIMS: usize = 1000;

#[tokio::test]
async fn bulk_of_deletions_blocks_no_claim() {
    let daemon = machine().await;
    let mut all = String::new();
    for number in 0..CLAIMS {
        let request = "{deviceClassName: gpu, count: 32}";
        let claim = claim(&format!("bulk-{number}"), request);
        write!(all, "---\n{claim}").unwrap();
    }
    let api = api(&daemon).await;
    for document in all.split("---\n").filter(|document| !document.is_empty()) {
        let object = serde_saphyr::from_str(document).unwrap();
        api.create(&object, "default").await.unwrap();
    }
    let file = daemon.write("bulk.yaml", all);
    let began = Instant::now();
    let args = ["claim", "delete", "-f", file.to_str().unwrap()];
    let (deleted, waited) = tokio::join!(daemon.cli(&args), async {
        let began = Instant::now();
        let devices = create(&daemon, "single", "{deviceClassName: gpu}").await;
        assert_eq!(devices.len(), 1);
        began.elapsed()
    });
    deleted.done();
    let took = began.elapsed();
    assert_eq!(api.claims(Some("default")).await.unwrap().len(), 1);
    // A machine that tests share is slower than one for claims: 500 a second, and one second.
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(waited < Duration::from_secs(5), "{waited:?}");
}
