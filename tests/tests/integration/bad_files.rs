//! Files that are no drivers: each is reported by its defect, and none of them hurts the others.

use std::fs::File;
use std::io::Write;

use nodedock_tests::Daemon;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, side_file, wasm};
use wasm_encoder::{
    Component, ComponentImportSection, ComponentTypeRef, ComponentTypeSection, EntityType, ImportSection,
    InstanceType, Module, TypeSection,
};

use crate::with_gpus;

/// A component that wants these interfaces, and offers none.
fn component_with_imports(names: &[&str]) -> Vec<u8> {
    let mut types = ComponentTypeSection::new();
    types.instance(&InstanceType::new());
    let mut imports = ComponentImportSection::new();
    for name in names {
        imports.import(*name, ComponentTypeRef::Instance(0));
    }
    Component::new().section(&types).section(&imports).clone().finish()
}

/// A core module that imports a function of another host, as tools for other hosts make it.
fn module_with_import(module: &str, name: &str) -> Vec<u8> {
    let mut types = TypeSection::new();
    types.ty().function([], []);
    let mut imports = ImportSection::new();
    imports.import(module, name, EntityType::Function(0));
    Module::new().section(&types).section(&imports).clone().finish()
}

#[tokio::test]
async fn each_bad_file_fails_with_words_of_its_own_while_good_ones_serve() {
    let whole = wasm(MOCK_GPU, Form::Component);
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", Vec::new(), "empty"),
        ("short", whole[..6].to_vec(), "cut off"),
        ("truncated", whole[..whole.len() / 3].to_vec(), "cut off"),
        ("damaged", damaged, "not valid WebAssembly"),
        ("text", b"(module)".to_vec(), "WebAssembly text"),
        ("html", b"<!DOCTYPE html><html>404</html>".to_vec(), "not WebAssembly"),
        ("precompiled", b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(), "precompiled"),
        ("future", b"\0asm\x07\0\x07\0".to_vec(), "unknown kind"),
        ("blank", component_with_imports(&[]), "lacks identity"),
        (
            "network",
            component_with_imports(&["wasi:sockets/tcp@0.2.0", "wasi:http/types@0.2.0"]),
            "no network",
        ),
        ("store", component_with_imports(&["wasi:keyvalue/store@0.2.0"]), "wasi:keyvalue/store@0.2.0"),
        ("stranger", component_with_imports(&["acme:robot/arm@1.0.0"]), "acme:robot/arm@1.0.0"),
        ("newer", component_with_imports(&["nodedock:driver/log@0.9.0"]), "nodedock:driver@0.9.0"),
        (
            "facet",
            component_with_imports(&["nodedock:driver/teleport@0.1.0"]),
            "newer version of the contract",
        ),
        ("browser", module_with_import("__wbindgen_placeholder__", "f"), "browser"),
        ("alone", Module::new().finish(), "no WIT inside"),
        ("wasip1", module_with_import("wasi_snapshot_preview1", "fd_write"), "wasm32-wasip1"),
    ];
    let daemon = with_gpus().await;
    for (name, bytes, _) in &cases {
        daemon.copy_in(&format!("{name}.wasm"), bytes);
    }
    for (name, _, expected) in &cases {
        let failed = daemon.until_state(&format!("{name}.wasm"), "failed").await;
        assert!(failed.reason.contains(expected), "{name}: {expected:?} in {:?}", failed.reason);
        assert_eq!(failed.devices, 0);
    }
    assert_eq!(daemon.until_serving(MOCK_GPU_FILE).await.devices, 11);
    let table = daemon.cli(&["get", "drivers"]).await.done();
    assert_eq!(table.lines().count(), cases.len() + 2, "{table}");
}

#[tokio::test]
async fn a_file_beyond_the_bound_is_refused_without_being_read_whole() {
    let daemon = Daemon::start().await;
    let file = File::create(daemon.driver_path(".huge.tmp")).unwrap();
    file.set_len(100 << 30).unwrap();
    std::fs::rename(daemon.driver_path(".huge.tmp"), daemon.driver_path("huge.wasm")).unwrap();
    let failed = daemon.until_state("huge.wasm", "failed").await;
    assert!(failed.reason.contains("larger than"), "{failed:?}");

    daemon.copy_in("mock-gpu.grant.yaml", vec![b'#'; 1 << 20]);
    daemon.copy_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    let failed = daemon.until_state(MOCK_GPU_FILE, "failed").await;
    assert!(failed.reason.contains("mock-gpu.grant.yaml is larger than"), "{failed:?}");
}

#[tokio::test]
async fn a_half_copied_driver_is_not_served_before_the_rest_is_there() {
    let daemon = Daemon::start().await;
    daemon.copy_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let bytes = wasm(MOCK_GPU, Form::Core);
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    let mut copy = File::create(daemon.driver_path(MOCK_GPU_FILE)).unwrap();
    copy.write_all(first).unwrap();
    // The writer stalls for so long that the file is looked at as it is.
    let failed = daemon.until_state(MOCK_GPU_FILE, "failed").await;
    assert!(failed.reason.contains("cut off"), "{failed:?}");
    copy.write_all(rest).unwrap();
    drop(copy);
    assert_eq!(daemon.until_serving(MOCK_GPU_FILE).await.reason, "");
}

#[tokio::test]
async fn odd_names_are_taken_and_what_is_no_driver_file_is_passed_over() {
    let daemon = Daemon::start().await;
    let bytes = wasm(MOCK_GPU, Form::Core);
    for ignored in
        [".wasm", ".hidden.wasm", "mock-gpu.wasm.bak", "mock-gpu.WASM", "README.md", "alone.grant.yaml"]
    {
        daemon.copy_in(ignored, &bytes);
    }
    std::fs::create_dir(daemon.driver_path("directory.wasm")).unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all.wasm", daemon.driver_path("dangling.wasm")).unwrap();
    let fifo = daemon.driver_path("pipe.wasm");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();

    let odd = "My GPU driver (1) – ünïcode";
    daemon.copy_in(&format!("{odd}.grant.yaml"), side_file(MOCK_GPU, "grant"));
    daemon.copy_in(&format!("{odd}.wasm"), &bytes);
    daemon.until_serving(&format!("{odd}.wasm")).await;
    daemon.copy_in("two\nlines.wasm", "nothing");
    daemon.until_state("two\nlines.wasm", "failed").await;

    let mut sources: Vec<_> = daemon.drivers().await.into_iter().map(|driver| driver.source).collect();
    sources.sort();
    assert_eq!(sources, [format!("{odd}.wasm"), "two\nlines.wasm".to_owned()]);
    let table = daemon.cli(&["get", "drivers"]).await.done();
    assert_eq!(table.lines().count(), 3, "a name cannot break the table: {table}");
}

#[tokio::test]
async fn a_link_to_a_driver_is_followed_as_in_a_mounted_config_map() {
    let daemon = Daemon::start().await;
    let dir = daemon.driver_path("..2026_01_01");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(MOCK_GPU_FILE), wasm(MOCK_GPU, Form::Core)).unwrap();
    std::fs::write(dir.join("mock-gpu.grant.yaml"), side_file(MOCK_GPU, "grant")).unwrap();
    std::os::unix::fs::symlink("..2026_01_01", daemon.driver_path("..data")).unwrap();
    for name in ["mock-gpu.grant.yaml", MOCK_GPU_FILE] {
        std::os::unix::fs::symlink(format!("..data/{name}"), daemon.driver_path(name)).unwrap();
    }
    let old = daemon.until_serving(MOCK_GPU_FILE).await.digest;

    let dir = daemon.driver_path("..2026_01_02");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join(MOCK_GPU_FILE), wasm(MOCK_GPU, Form::Component)).unwrap();
    std::fs::write(dir.join("mock-gpu.grant.yaml"), side_file(MOCK_GPU, "grant")).unwrap();
    std::os::unix::fs::symlink("..2026_01_02", daemon.driver_path("..data_tmp")).unwrap();
    std::fs::rename(daemon.driver_path("..data_tmp"), daemon.driver_path("..data")).unwrap();
    daemon.until_driver(MOCK_GPU_FILE, |driver| driver.digest != old && driver.state == "serving").await;
}

#[tokio::test]
async fn a_link_that_leads_out_of_the_directory_is_refused() {
    let daemon = Daemon::start().await;
    let outside = daemon.write("gpu", wasm(MOCK_GPU, Form::Core));
    daemon.copy_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    std::os::unix::fs::symlink(&outside, daemon.driver_path(MOCK_GPU_FILE)).unwrap();
    let failed = daemon.until_state(MOCK_GPU_FILE, "failed").await;
    assert!(failed.reason.contains("leads out of its directory"), "{failed:?}");
    std::fs::remove_file(daemon.driver_path(MOCK_GPU_FILE)).unwrap();
    daemon.copy_in(MOCK_GPU_FILE, std::fs::read(outside).unwrap());
    daemon.until_serving(MOCK_GPU_FILE).await;
}
