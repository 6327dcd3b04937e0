//! Metadata files, read by the library that programs in containers use.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options};
use serde_json::{Value, json};

use crate::{lines, programs};

#[tokio::test]
async fn library_accepts_every_file_version() {
    let Some(program) = or_skip(
        "metadata of devices, by the library",
        programs::go("device-metadata"),
    ) else {
        return;
    };
    let daemon = Daemon::with_gpus(Options::default()).await;
    let claim = gpu_claim("one", &["gpus/gpu-0", "gpus/gpu-1"]);
    daemon.prepared(request(&pod("a"), &[&claim])).await;
    let mounts = daemon.only_cdi_file().mounts();
    assert_eq!(mounts.len(), 2);
    for (index, (path, _)) in mounts.iter().enumerate() {
        let read = lines(&program, &[path.to_str().unwrap()]).await;
        let read: Vec<Value> = read
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let versions: Vec<_> = read
            .iter()
            .map(|object| object["version"].as_str().unwrap())
            .collect();
        assert_eq!(
            versions,
            [
                "metadata.resource.k8s.io/v1beta1",
                "metadata.resource.k8s.io/v1alpha1"
            ]
        );
        assert!(
            read.iter().all(|object| object["invalid"] == ""),
            "{read:?}"
        );
        let bytes = std::fs::read(path).unwrap();
        let written: Value = serde_json::Deserializer::from_slice(&bytes)
            .into_iter()
            .next()
            .unwrap()
            .unwrap();
        for object in read {
            assert_eq!(object["object"], written, "nothing of the file is lost");
        }
        let request = &written["requests"][0];
        assert_eq!(request["name"], format!("device-{index}"));
        assert!(
            request["devices"][0]["attributes"]["model"]["string"].is_string(),
            "{request}"
        );
        assert_eq!(written["metadata"]["generation"], json!(1));
    }
}
