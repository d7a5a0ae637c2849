"""From text files to batches: corpus, tokenizer, token files, in an order that is a function of the step.

Every public name is importable from here and loaded on first use, so that reading token files needs
neither torch nor tokenizers.
"""

from typing import TYPE_CHECKING

from core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from core.datasets.baselines import bits_per_byte as bits_per_byte
    from core.datasets.baselines import gzip_bits_per_byte as gzip_bits_per_byte
    from core.datasets.baselines import unigram_bits_per_byte as unigram_bits_per_byte
    from core.datasets.batches import GPTBatches as GPTBatches
    from core.datasets.blend import BlendedBatches as BlendedBatches
    from core.datasets.blend import open_blend as open_blend
    from core.datasets.card import TokenCard as TokenCard
    from core.datasets.conversations import ConversationBatches as ConversationBatches
    from core.datasets.conversations import PreferenceBatches as PreferenceBatches
    from core.datasets.corpus.build import CorpusFiles as CorpusFiles
    from core.datasets.corpus.build import TextFiles as TextFiles
    from core.datasets.corpus.build import prepare_files as prepare_files
    from core.datasets.corpus.default import PreparedCorpus as PreparedCorpus
    from core.datasets.corpus.default import prepare_default_corpus as prepare_default_corpus
    from core.datasets.corpus.standard_library import SourceFiles as SourceFiles
    from core.datasets.corpus.standard_library import read_texts as read_texts
    from core.datasets.corpus.standard_library import split_by_hash as split_by_hash
    from core.datasets.corpus.standard_library import standard_library as standard_library
    from core.datasets.order import draws as draws
    from core.datasets.order import permute as permute
    from core.datasets.order import sample_ids as sample_ids
    from core.datasets.packing import IGNORED_LABEL as IGNORED_LABEL
    from core.datasets.packing import Packing as Packing
    from core.datasets.splits import TokenRange as TokenRange
    from core.datasets.splits import TokenSource as TokenSource
    from core.datasets.splits import first_documents as first_documents
    from core.datasets.splits import split_documents as split_documents
    from core.datasets.token_file import TokenFile as TokenFile
    from core.datasets.token_file_writer import TokenFileWriter as TokenFileWriter
    from core.datasets.tokenizers.any_tokenizer import AnyTokenizer as AnyTokenizer
    from core.datasets.tokenizers.any_tokenizer import check_tokenizer as check_tokenizer
    from core.datasets.tokenizers.any_tokenizer import load_tokenizer as load_tokenizer
    from core.datasets.tokenizers.any_tokenizer import tokenizer_of as tokenizer_of
    from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer as ByteTokenizer
    from core.datasets.tokenizers.trained import END_OF_TEXT as END_OF_TEXT
    from core.datasets.tokenizers.trained import Tokenizer as Tokenizer
    from core.datasets.tokenizers.trained import train_tokenizer as train_tokenizer
else:
    __getattr__, __dir__ = lazy_exports(__name__)
