//! Values of Parquet's pages, straight into packed rows.
//!
//! A column of numbers without nulls, as common writers store it, needs no Arrow array on its way: its pages hold either
//! the values or runs of their places in a dictionary. Whatever is stored in another way is [`Unfit`] and goes through
//! Arrow.
//!
//! - PA-1: a page may hold anything: what does not make sense is an error, and nothing is read or written outside.

use parquet::{
    basic::{Encoding, Type},
    column::page::{Page, PageReader},
    errors::{ParquetError, Result},
    file::{
        metadata::{ColumnChunkMetaData, RowGroupMetaData},
        serialized_reader::SerializedPageReader,
    },
};
use std::{fs::File, sync::Arc};

/// Rows of which all columns are put before the next ones: what stays in a near cache.
const BLOCK: usize = 1024;

/// Whether rows were filled in, or have to go through Arrow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    Filled,
    Unfit,
}

/// Where a column's values lie in packed rows.
pub(crate) struct Place {
    /// Of the file.
    pub leaf: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// Columns of a row group, from some row on.
pub(crate) struct Pages {
    columns: Vec<Column>,
    width: usize,
}

impl Pages {
    /// Columns of a row group that go into rows of `width` bytes; `None` if one has another form.
    pub(crate) fn open(
        file: File,
        group: &RowGroupMetaData,
        places: &[Place],
        width: usize,
        first: usize,
    ) -> Result<Option<Self>> {
        let file = Arc::new(file);
        let mut columns = Vec::with_capacity(places.len());
        for place in places {
            let chunk = group.column(place.leaf);
            let Some(mut column) = Column::open(&file, chunk, group.num_rows(), place)? else {
                return Ok(None);
            };
            if column.skip(first)? == Fit::Unfit {
                return Ok(None);
            }
            columns.push(column);
        }
        Ok(Some(Self { columns, width }))
    }

    /// Fills in the next rows. What is unfit may have been written to in part.
    pub(crate) fn fill(&mut self, rows: &mut [u8]) -> Result<Fit> {
        for rows in rows.chunks_mut(BLOCK * self.width.max(1)) {
            for column in &mut self.columns {
                let fit = match column.bytes {
                    1 => column.put::<1>(rows, self.width)?,
                    2 => column.put::<2>(rows, self.width)?,
                    4 => column.put::<4>(rows, self.width)?,
                    8 => column.put::<8>(rows, self.width)?,
                    _ => Fit::Unfit,
                };
                if fit == Fit::Unfit {
                    return Ok(fit);
                }
            }
        }
        Ok(Fit::Filled)
    }
}

fn broken(what: &str) -> ParquetError {
    ParquetError::General(format!("a page {what}"))
}

struct Column {
    pages: SerializedPageReader<File>,
    /// Whether there are levels that say which values are null.
    optional: bool,
    /// Bytes of a value in the file, of which those that matter come first.
    stored: usize,
    bytes: usize,
    offset: usize,
    dictionary: Vec<u8>,
    page: Option<Page>,
    /// Values of the page that were not yet used.
    left: usize,
    /// Where the next of them begin.
    at: usize,
    runs: Option<Runs>,
}

impl Column {
    fn open(
        file: &Arc<File>,
        chunk: &ColumnChunkMetaData,
        rows: i64,
        place: &Place,
    ) -> Result<Option<Self>> {
        let about = chunk.column_descr();
        let stored = match about.physical_type() {
            Type::INT32 | Type::FLOAT => 4,
            Type::INT64 | Type::DOUBLE => 8,
            _ => return Ok(None),
        };
        if about.max_rep_level() > 0 || about.max_def_level() > 1 || stored < place.bytes {
            return Ok(None);
        }
        let rows = usize::try_from(rows).unwrap_or_default();
        Ok(Some(Self {
            pages: SerializedPageReader::new(Arc::clone(file), chunk, rows, None)?,
            optional: about.max_def_level() == 1,
            stored,
            bytes: place.bytes,
            offset: place.offset,
            dictionary: Vec::new(),
            page: None,
            left: 0,
            at: 0,
            runs: None,
        }))
    }

    /// Goes to the next page with values.
    fn turn(&mut self) -> Result<Fit> {
        while self.left == 0 {
            let page = self.pages.get_next_page()?.ok_or_else(|| broken("is missing"))?;
            let (values, encoding, start) = match &page {
                Page::DictionaryPage { buf, encoding, .. } => {
                    if !matches!(encoding, Encoding::PLAIN | Encoding::PLAIN_DICTIONARY) {
                        return Ok(Fit::Unfit);
                    }
                    let values = buf.chunks_exact(self.stored);
                    self.dictionary =
                        values.flat_map(|value| &value[..self.bytes]).copied().collect();
                    continue;
                }
                Page::DataPage { buf, num_values, encoding, def_level_encoding, .. } => {
                    let values = *num_values as usize;
                    let mut start = 0;
                    if self.optional {
                        if *def_level_encoding != Encoding::RLE {
                            return Ok(Fit::Unfit);
                        }
                        let length = buf.first_chunk().ok_or_else(|| broken("has no levels"))?;
                        start = 4 + u32::from_le_bytes(*length) as usize;
                        let levels = buf.get(4..start).ok_or_else(|| broken("has no levels"))?;
                        if !all_are_there(levels, values)? {
                            return Ok(Fit::Unfit);
                        }
                    }
                    (values, *encoding, start)
                }
                Page::DataPageV2 {
                    num_values,
                    encoding,
                    num_nulls,
                    def_levels_byte_len,
                    rep_levels_byte_len,
                    ..
                } => {
                    if *num_nulls > 0 {
                        return Ok(Fit::Unfit);
                    }
                    let start = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                    (*num_values as usize, *encoding, start)
                }
            };
            (self.left, self.at) = (values, start);
            self.runs = match encoding {
                Encoding::PLAIN => None,
                Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY if values == 0 => None,
                Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                    let bits = page.buffer().get(start).copied();
                    let bits =
                        bits.filter(|bits| *bits <= 32).ok_or_else(|| broken("has no width"))?;
                    self.at += 1;
                    Some(Runs { bits: bits.into(), run: Run::Same { value: 0, left: 0 } })
                }
                _ => return Ok(Fit::Unfit),
            };
            self.page = Some(page);
        }
        Ok(Fit::Filled)
    }

    /// Leaves out values.
    fn skip(&mut self, mut count: usize) -> Result<Fit> {
        while count > 0 {
            if self.left == 0 {
                let next = self.pages.peek_next_page()?.ok_or_else(|| broken("is missing"))?;
                let values = next.num_rows.or(next.num_levels).filter(|_| !next.is_dict);
                if let Some(values) = values.filter(|values| *values <= count) {
                    self.pages.skip_next_page()?;
                    count -= values;
                    continue;
                }
                if self.turn()? == Fit::Unfit {
                    return Ok(Fit::Unfit);
                }
            }
            let some = count.min(self.left);
            let page = self.page.as_ref().ok_or_else(|| broken("is missing"))?.buffer();
            match &mut self.runs {
                None => self.at += some * self.stored,
                Some(runs) => runs.each(page, &mut self.at, some, |_| Some(()))?,
            }
            self.left -= some;
            count -= some;
        }
        Ok(Fit::Filled)
    }

    /// Puts the next values into their place in rows.
    fn put<const N: usize>(&mut self, rows: &mut [u8], width: usize) -> Result<Fit> {
        let mut rows = rows.chunks_exact_mut(width);
        while rows.len() > 0 {
            if self.turn()? == Fit::Unfit {
                return Ok(Fit::Unfit);
            }
            let some = rows.len().min(self.left);
            let page = self.page.as_ref().ok_or_else(|| broken("is missing"))?.buffer();
            let mut places = rows
                .by_ref()
                .take(some)
                .filter_map(|row| row[self.offset..].first_chunk_mut::<N>());
            match &mut self.runs {
                None => {
                    let end = self.at + some * self.stored;
                    let values = page.get(self.at..end).ok_or_else(|| broken("is too short"))?;
                    let values = values.chunks_exact(self.stored).filter_map(<[u8]>::first_chunk);
                    places.zip(values).for_each(|(place, value)| *place = *value);
                    self.at = end;
                }
                Some(runs) => {
                    let dictionary = self.dictionary.as_chunks::<N>().0;
                    runs.each(page, &mut self.at, some, |index| {
                        *places.next()? = *dictionary.get(index as usize)?;
                        Some(())
                    })?;
                }
            }
            self.left -= some;
        }
        Ok(Fit::Filled)
    }
}

/// Whether levels of one bit say that no value is null.
fn all_are_there(levels: &[u8], values: usize) -> Result<bool> {
    let mut runs = Runs { bits: 1, run: Run::Same { value: 0, left: 0 } };
    let (mut at, mut left) = (0, values);
    while left > 0 {
        runs.next(levels, &mut at)?;
        match &mut runs.run {
            Run::Same { value: 0, .. } => return Ok(false),
            Run::Same { left: run, .. } => left -= left.min(*run),
            Run::Packed { start, left: run, .. } => {
                let some = left.min(*run);
                let bytes = levels.get(*start..*start + some.div_ceil(8));
                let bytes = bytes.ok_or_else(|| broken("has too few levels"))?;
                let (last, whole) = bytes.split_last().ok_or_else(|| broken("has no levels"))?;
                let mask = 0xff_u8 >> (some.next_multiple_of(8) - some);
                if whole.iter().any(|byte| *byte != 0xff) || last & mask != mask {
                    return Ok(false);
                }
                left -= some;
            }
        }
        runs.run = Run::Same { value: 0, left: 0 };
    }
    Ok(true)
}

/// Parquet's mix of repeated and of packed numbers.
struct Runs {
    bits: usize,
    run: Run,
}

enum Run {
    /// One number, so many times.
    Same { value: u32, left: usize },
    /// Numbers side by side, from a byte of the page on, some of which are used already.
    Packed { start: usize, used: usize, left: usize },
}

impl Runs {
    /// Reads the head of the next run.
    fn next(&mut self, page: &[u8], at: &mut usize) -> Result<()> {
        let mut head = 0_u64;
        for shift in (0..35).step_by(7) {
            let byte = *page.get(*at).ok_or_else(|| broken("ends within a run"))?;
            *at += 1;
            head |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        let count = (head >> 1) as usize;
        if count == 0 {
            return Err(broken("has a run of nothing"));
        }
        if head & 1 == 1 {
            self.run = Run::Packed { start: *at, used: 0, left: count * 8 };
            *at += count * self.bits;
            return Ok(());
        }
        let bytes = self.bits.div_ceil(8);
        let value = page.get(*at..*at + bytes).ok_or_else(|| broken("ends within a run"))?;
        let value = value.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        *at += bytes;
        self.run = Run::Same { value: value as u32, left: count };
        Ok(())
    }

    /// Calls `each` with the next numbers. It knows what is no place in its dictionary.
    fn each(
        &mut self,
        page: &[u8],
        at: &mut usize,
        mut count: usize,
        mut each: impl FnMut(u32) -> Option<()>,
    ) -> Result<()> {
        let outside = || broken("names a value that its dictionary does not have");
        while count > 0 {
            match &mut self.run {
                Run::Same { left: 0, .. } | Run::Packed { left: 0, .. } => self.next(page, at)?,
                Run::Same { value, left } => {
                    let some = count.min(*left);
                    (0..some).try_for_each(|_| each(*value)).ok_or_else(outside)?;
                    (*left, count) = (*left - some, count - some);
                }
                Run::Packed { start, used, left } => {
                    let some = count.min(*left);
                    unpack(page, *start, *used, self.bits, some, &mut each)?.ok_or_else(outside)?;
                    (*used, *left, count) = (*used + some, *left - some, count - some);
                }
            }
        }
        Ok(())
    }
}

/// Calls `each` with numbers of so many bits, the first of which is `first` numbers after a byte of a page.
#[inline]
fn unpack(
    page: &[u8],
    start: usize,
    first: usize,
    bits: usize,
    count: usize,
    each: &mut impl FnMut(u32) -> Option<()>,
) -> Result<Option<()>> {
    let end = start + ((first + count) * bits).div_ceil(8);
    if end > page.len() {
        return Err(broken("ends within a run"));
    }
    let mask = (1_u64 << bits) - 1;
    let mut number = first;
    let last = first + count;
    while number < last {
        let bit = number * bits;
        let bytes = &page[start + bit / 8..];
        // Four numbers fit into one word, of which the first four bits may be of another.
        if bits <= 15
            && last - number >= 8
            && let Some(low) = word_at(bytes, 0)
            && let Some(high) = word_at(bytes, (bit % 8 + 4 * bits) / 8)
            && bit.is_multiple_of(4)
        {
            let (low, high) = (low >> (bit % 8), high >> ((bit % 8 + 4 * bits) % 8));
            for word in [low, high] {
                for within in 0..4 {
                    if each((word >> (within * bits) & mask) as u32).is_none() {
                        return Ok(None);
                    }
                }
            }
            number += 8;
            continue;
        }
        // A word holds the number, wherever in its first byte it begins.
        let word = word_at(bytes, 0).unwrap_or_else(|| tail(bytes));
        if each((word >> (bit % 8) & mask) as u32).is_none() {
            return Ok(None);
        }
        number += 1;
    }
    Ok(Some(()))
}

fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

/// The last bytes of a page as a word.
#[cold]
fn tail(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_what_was_written(
            bits in 1_usize..20, parts in prop::collection::vec((any::<bool>(), 1_usize..9, any::<u32>()), 1..9),
            cut in 1_usize..7,
        ) {
            let (mut page, mut expected) = (Vec::new(), Vec::new());
            for (packed, count, seed) in parts {
                let number = |index: usize| (seed.rotate_left(index as u32)) & ((1 << bits) - 1);
                if packed {
                    page.push((count << 1 | 1) as u8);
                    let start = page.len();
                    page.resize(start + count * bits, 0);
                    for index in 0..count * 8 {
                        for bit in (0..bits).filter(|bit| number(index) >> bit & 1 == 1) {
                            page[start + (index * bits + bit) / 8] |= 1 << ((index * bits + bit) % 8);
                        }
                        expected.push(number(index));
                    }
                } else {
                    page.push((count << 1) as u8);
                    page.extend(&number(0).to_le_bytes()[..bits.div_ceil(8)]);
                    expected.extend(std::iter::repeat_n(number(0), count));
                }
            }
            let mut runs = Runs { bits, run: Run::Same { value: 0, left: 0 } };
            let (mut at, mut found) = (0, Vec::new());
            while found.len() < expected.len() {
                let some = cut.min(expected.len() - found.len());
                runs.each(&page, &mut at, some, |number| { found.push(number); Some(()) }).unwrap();
            }
            prop_assert_eq!(&found, &expected);
            prop_assert!(runs.each(&page, &mut at, 1, |_| Some(())).is_err());
        }

        #[test]
        fn a_page_of_anything_is_no_panic(page in prop::collection::vec(any::<u8>(), 0..40), bits in 0_usize..33) {
            let mut runs = Runs { bits, run: Run::Same { value: 0, left: 0 } };
            let _ = runs.each(&page, &mut 0, 100, |number| (number < 1000).then_some(()));
            let _ = all_are_there(&page, 100);
        }
    }
}
