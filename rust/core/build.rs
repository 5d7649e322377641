//! Gives the build a digest of its own sources, which the hello compares: two builds that would compute differently must
//! not meet.

use std::path::{Path, PathBuf};

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).expect("the sources can be listed");
    for entry in entries.map(|entry| entry.expect("the sources can be listed").path()) {
        if entry.is_dir() {
            files(&entry, found);
        } else if entry.extension().is_some_and(|e| e == "rs") {
            found.push(entry);
        }
    }
}

fn main() {
    let mut found = Vec::new();
    files(Path::new("src"), &mut found);
    found.sort();
    // FNV-1a: it must tell builds apart, not resist anybody.
    let mut digest = 0xcbf29ce484222325u64;
    for path in &found {
        let name = path.to_string_lossy().replace('\\', "/");
        for byte in name.bytes().chain(std::fs::read(path).expect("a source can be read")) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x100000001b3);
        }
    }
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rustc-env=CLOISTER_CORE_SOURCES={digest:016x}");
}
