//! Drivers and arguments that are no good: each ends soon, with a sentence, and leaves no process.

use std::path::Path;

use nodedock_tests::DEADLINE;
use nodedock_tests::places::beside;

use super::{conform, of, outcomes, text};

/// A process that has the word among its arguments; this one has it not.
fn is_running(word: &str) -> bool {
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let command =
        |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
    entries.map(command).any(|command| {
        let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
        words.contains(&word.as_bytes())
    })
}

/// Waits until no process has the word among its arguments.
async fn until_ended(word: &str) {
    let ended = async {
        while is_running(word) {
            tokio::task::yield_now().await;
        }
    };
    let found = tokio::time::timeout(DEADLINE, ended).await;
    assert!(found.is_ok(), "{word} is still running");
}

/// The output of a run with a driver that is a script, and its exit code. The script has `word` as an argument.
async fn script(script: &str, word: &str, start_seconds: &str) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("driver.sh");
    std::fs::write(&file, script).expect("it is written");
    let command = format!("sh {} {word}", text(&file));
    let output = conform(&[
        "--exec",
        &command,
        "--start-timeout",
        start_seconds,
        "--call-timeout",
        "2",
    ])
    .await;
    assert_eq!(output.status.code(), Some(1));
    until_ended(word).await;
    String::from_utf8(output.stdout).expect("text")
}

#[tokio::test]
async fn failed_start_shows_last_output() {
    // Another suite may run at the same time.
    let suite = std::process::id();
    let left = [601, 602].map(|seconds| format!("{seconds}.{suite}"));
    let leaves = format!(
        "echo no device here; setsid sh -c 'exec sleep {}' & sleep {} & exit 3\n",
        left[0], left[1]
    );
    for (name, text, start_seconds, expected) in [
        (
            "exits-at-once-1",
            "echo no device here >&2; exit 3\n",
            "60",
            "it ended with exit code 3",
        ),
        (
            "prints-much-2",
            "yes | head -c 9000000; echo no device here; exit 3\n",
            "60",
            "it ended with exit code 3",
        ),
        (
            "waits-3",
            "echo no device here; sleep 600 & wait\n",
            "5",
            "did not register within 5s: there is no socket",
        ),
        (
            "leaves-4",
            leaves.as_str(),
            "60",
            "it ended with exit code 3",
        ),
        (
            "dies-5",
            "echo no device here; kill -9 $$\n",
            "60",
            "it was ended by signal 9",
        ),
    ] {
        let word = format!("{name}-{suite}");
        let shown = script(text, &word, start_seconds).await;
        assert!(
            shown.contains(expected) && shown.contains("| driver: no device here"),
            "{word}: {shown}"
        );
        assert!(shown.contains("0 passed, 1 failed, "), "{word}: {shown}");
        assert!(shown.len() < 100_000, "{word} shows {} bytes", shown.len());
    }
    for word in &left {
        until_ended(word).await;
    }
}

#[tokio::test]
async fn invalid_arguments_are_refused_and_named() {
    let missing = Path::new("/nonexistent/driver.wasm");
    let directory = tempfile::tempdir().expect("a directory");
    let [large, small, grant] =
        ["large.wasm", "small.wasm", "grant.yaml"].map(|name| directory.path().join(name));
    for (file, bytes) in [(&large, (64 << 20) + 1), (&small, 8), (&grant, 64 << 20)] {
        let file = std::fs::File::create(file).expect("a new file");
        file.set_len(bytes).expect("it takes no room");
    }
    for (args, code, expected) in [
        (
            vec!["--exec", "driver {stat}"],
            2,
            "{stat} is no placeholder",
        ),
        (vec!["--exec", "driver 'a"], 2, "a quote that is not closed"),
        (vec!["--exec", ""], 2, "the command is empty"),
        (
            vec!["--exec", "true", "--only", "wire.nothing"],
            2,
            "wire.nothing is neither a case nor a level",
        ),
        (
            vec!["--exec", "/nonexistent/driver"],
            1,
            "start /nonexistent/driver",
        ),
        (
            vec!["--exec", "true", "--device", "gpu-0"],
            2,
            "it is no POOL/DEVICE",
        ),
        (
            vec!["--exec", "true", "--parameters", "[]"],
            2,
            "parameters are an object",
        ),
        (
            vec!["--exec", "true", "--slices-timeout", "0"],
            2,
            "--slices-timeout",
        ),
        (
            vec!["--exec", "true", "--socket-dir", "/tmp"],
            2,
            "cannot be used with",
        ),
        (vec![text(missing)], 1, "read /nonexistent/driver.wasm"),
        (
            vec![text(&large)],
            1,
            "large.wasm is larger than 67108864 bytes",
        ),
        (
            vec![text(&small), "--grant", text(&grant)],
            1,
            "grant.yaml is larger than ",
        ),
        (vec!["--socket-dir", "/tmp"], 2, "--driver <NAME>"),
        (
            vec!["--socket-dir", "/tmp", "--driver", "a.example.com/b"],
            2,
            "--socket-dir is for DRA drivers",
        ),
        (
            vec!["--socket-dir", "/nonexistent", "--driver", "a.example.com"],
            1,
            "find /nonexistent",
        ),
        (vec![], 2, "required"),
    ] {
        let output = conform(&args).await;
        let shown = [output.stdout, output.stderr].concat();
        let shown = String::from_utf8(shown).expect("text");
        assert!(
            output.status.code() == Some(code) && shown.contains(expected),
            "{args:?}: {:?} {shown}",
            output.status
        );
    }
}

#[tokio::test]
async fn driver_with_other_name_fails_registration() {
    let program = beside("native-null");
    let command = format!(
        "{} --registry-dir {{registry}} --plugins-dir {{plugins}}",
        text(&program)
    );
    let args = [
        "--exec",
        &command,
        "--driver",
        "other.example.com",
        "--start-timeout",
        "60",
    ];
    let (outcomes, report) = outcomes(&args).await;
    assert_eq!(of(&outcomes, "failed"), ["wire.registers"]);
    let why = report["verdicts"][0]["reason"].as_str().expect("a reason");
    assert!(
        why.contains(r#"the driver's name is "null.example.com", not "other.example.com""#),
        "{why}"
    );
}

#[tokio::test]
async fn list_is_yaml_with_every_case() {
    let output = conform(&["--list"]).await;
    assert_eq!(output.status.code(), Some(0));
    let list: serde_json::Value =
        serde_saphyr::from_str(&String::from_utf8(output.stdout).expect("text")).expect("YAML");
    let cases = list.as_array().expect("a list");
    assert!(cases.len() > 60 && cases.iter().all(|case| case["source"].is_string()));
}
