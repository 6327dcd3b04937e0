//! Files that are no drivers: each is reported by its defect, and none of them hurts the others.

use std::fs::File;
use std::io::Write;

use nodedock_tests::Daemon;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, side_file, wasm};

#[tokio::test]
async fn oversized_file_is_not_read_whole() {
    let daemon = Daemon::start().await;
    let file = File::create(daemon.driver_path(".huge.tmp")).unwrap();
    file.set_len(100 << 30).unwrap();
    std::fs::rename(
        daemon.driver_path(".huge.tmp"),
        daemon.driver_path("huge.wasm"),
    )
    .unwrap();
    daemon.until_failed("huge.wasm", &["larger than"]).await;

    daemon.copy_in("mock-gpu.grant.yaml", vec![b'#'; 1 << 20]);
    daemon.copy_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    daemon
        .until_failed(MOCK_GPU_FILE, &["mock-gpu.grant.yaml is larger than"])
        .await;
}

#[tokio::test]
async fn partially_copied_driver_is_not_served() {
    let daemon = Daemon::start().await;
    daemon.copy_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let bytes = wasm(MOCK_GPU, Form::Core);
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    let mut copy = File::create(daemon.driver_path(MOCK_GPU_FILE)).unwrap();
    copy.write_all(first).unwrap();
    // The writer stalls for so long that the file is looked at as it is.
    daemon.until_failed(MOCK_GPU_FILE, &["cut off"]).await;
    copy.write_all(rest).unwrap();
    drop(copy);
    assert_eq!(daemon.until_serving(MOCK_GPU_FILE).await.reason, "");
}

#[tokio::test]
async fn driver_files_load_under_any_name() {
    let daemon = Daemon::start().await;
    let bytes = wasm(MOCK_GPU, Form::Core);
    for ignored in [
        ".wasm",
        ".hidden.wasm",
        "mock-gpu.wasm.bak",
        "mock-gpu.WASM",
        "README.md",
        "alone.grant.yaml",
    ] {
        daemon.copy_in(ignored, &bytes);
    }
    std::fs::create_dir(daemon.driver_path("directory.wasm")).unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all.wasm", daemon.driver_path("dangling.wasm"))
        .unwrap();
    let fifo = daemon.driver_path("pipe.wasm");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();

    let odd = "My GPU driver (1) – ünïcode";
    daemon.copy_in(&format!("{odd}.grant.yaml"), side_file(MOCK_GPU, "grant"));
    daemon.copy_in(&format!("{odd}.wasm"), &bytes);
    daemon.until_serving(&format!("{odd}.wasm")).await;
    daemon.copy_in("two\nlines.wasm", "nothing");
    daemon.until_state("two\nlines.wasm", "failed").await;

    let mut sources: Vec<_> = daemon
        .drivers()
        .await
        .into_iter()
        .map(|driver| driver.source)
        .collect();
    sources.sort();
    assert_eq!(
        sources,
        [format!("{odd}.wasm"), "two\nlines.wasm".to_owned()]
    );
    let table = daemon.cli(&["get", "drivers"]).await.done();
    assert_eq!(
        table.lines().count(),
        3,
        "a name cannot break the table: {table}"
    );
}

#[tokio::test]
async fn linked_driver_is_loaded() {
    let daemon = Daemon::start().await;
    let dir = daemon.driver_path("..2026_01_01");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(MOCK_GPU_FILE), wasm(MOCK_GPU, Form::Core)).unwrap();
    std::fs::write(
        dir.join("mock-gpu.grant.yaml"),
        side_file(MOCK_GPU, "grant"),
    )
    .unwrap();
    std::os::unix::fs::symlink("..2026_01_01", daemon.driver_path("..data")).unwrap();
    for name in ["mock-gpu.grant.yaml", MOCK_GPU_FILE] {
        std::os::unix::fs::symlink(format!("..data/{name}"), daemon.driver_path(name)).unwrap();
    }
    let old = daemon.until_serving(MOCK_GPU_FILE).await.digest;

    let dir = daemon.driver_path("..2026_01_02");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(MOCK_GPU_FILE), wasm(MOCK_GPU, Form::Component)).unwrap();
    std::fs::write(
        dir.join("mock-gpu.grant.yaml"),
        side_file(MOCK_GPU, "grant"),
    )
    .unwrap();
    std::os::unix::fs::symlink("..2026_01_02", daemon.driver_path("..data_tmp")).unwrap();
    std::fs::rename(
        daemon.driver_path("..data_tmp"),
        daemon.driver_path("..data"),
    )
    .unwrap();
    daemon
        .until_driver(MOCK_GPU_FILE, |driver| {
            driver.digest != old && driver.state == "serving"
        })
        .await;

    let outside = daemon.write("outside", wasm(MOCK_GPU, Form::Core));
    std::os::unix::fs::symlink(outside, daemon.driver_path("outside.wasm")).unwrap();
    daemon
        .until_failed("outside.wasm", &["leads out of its directory"])
        .await;
}
