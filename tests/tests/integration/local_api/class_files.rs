//! DeviceClasses of files: they outlive the checkpoint, and a file that is not valid is named.

use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{Daemon, Options, Root};

use super::{CLASS, create};

#[tokio::test]
async fn classes_of_files_outlive_checkpoint() {
    let root = Root::new();
    let directory = root.state().join("deviceclasses");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("gpu.yaml"), CLASS).unwrap();
    let mut daemon = Daemon::start_on(root, Options::default().flag("--local-api")).await;
    daemon.install_gpus("driverVersion: 1.0.0\n");
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_log("DeviceClass applied").await;
    let request = "{deviceClassName: gpu}";
    assert_eq!(create(&daemon, "before", request).await.len(), 1);
    daemon.terminate().await;
    for name in ["checkpoint.db", "checkpoint.db-wal", "checkpoint.db-shm"] {
        let removed = std::fs::remove_file(daemon.state().join(name));
        assert!(removed.is_ok() || name != "checkpoint.db");
    }
    std::fs::remove_file(daemon.log_path()).unwrap();
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_log("DeviceClass applied").await;
    assert_eq!(create(&daemon, "after", request).await.len(), 1);
    // A field that a class does not have is refused, and the class stays as it was.
    let file = directory.join("gpu.yaml");
    std::fs::write(&file, CLASS.replace("selectors", "selectrs")).unwrap();
    daemon
        .until_conditions(&["device-class-file-invalid"])
        .await;
    assert_eq!(create(&daemon, "still", request).await.len(), 1);
    std::fs::write(&file, CLASS).unwrap();
    daemon.until_conditions(&[]).await;
}
